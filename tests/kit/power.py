"""A disk whose power is cut for real: ext4 on a loop device, shut down by the kernel without a last write, and mounted anew.

EXT4_IOC_SHUTDOWN is what xfstests pulls the plug with ("godown"): what ext4 has not yet written is dropped, and mounting it again replays
its own journal as after any crash. The mount options make it as careless as ext4 can be: data in any order, and nothing written unasked
for five minutes.
"""

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.kit.waiting import until

# _IOR('X', 125, u32), and its flag for "do not even write the log".
EXT4_IOC_SHUTDOWN, WITHOUT_THE_LOG = 0x8004587D, 2
OPTIONS = "loop,noauto_da_alloc,data=writeback,commit=300"
SIZE_BYTES = 400 << 20


class Disk:
    """An ext4 of its own under a folder."""

    def __init__(self, home: Path):
        if os.getuid() != 0:
            pytest.skip("only root can mount a disk")
        if shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
            pytest.skip("needs mkfs.ext4 and loop devices")
        self._image, self.folder = home / "disk.img", home / "disk"
        self.folder.mkdir()
        with self._image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", self._image], check=True)
        self._mount()

    def _mount(self) -> None:
        subprocess.run(["mount", "-t", "ext4", "-o", OPTIONS, self._image, self.folder], check=True)

    def cut(self) -> None:
        """The power goes: nothing more is written, and what was not synced is lost."""
        folder = os.open(self.folder, os.O_RDONLY)
        fcntl.ioctl(folder, EXT4_IOC_SHUTDOWN, struct.pack("I", WITHOUT_THE_LOG))
        os.close(folder)

    def back(self) -> None:
        """The power is there again."""
        self.remove()
        self._mount()

    def remove(self) -> None:
        """Unmount it, as soon as nobody has a file of it open, nor a mount namespace that was copied from this one."""
        until(lambda: not subprocess.run(["umount", self.folder], capture_output=True).returncode, seconds=60, every_seconds=0.2)
        attached = ["losetup", "--associated", self._image]
        until(lambda: not subprocess.run(attached, capture_output=True, check=True).stdout, seconds=200, every_seconds=0.2)

    def detach(self) -> None:
        """Unmount it once nobody has a file of it open any more, such as a database that a test has looked into."""
        subprocess.run(["umount", "--lazy", self.folder], check=True)

    @property
    def mark(self) -> dict[str, str]:
        """What is in the environment of every process that this disk's power is for."""
        return {"LOCKSTEP_TEST_POWER": str(self.folder)}

    def kill_all(self, process: "subprocess.Popen[str]") -> None:
        """Kill a command with all that it has started, whoever their parent is now, as a power cut does."""
        while left := [one for one in psutil.process_iter() if self._is_marked(one)]:
            for one in left:
                with contextlib.suppress(psutil.Error):
                    one.kill()
        process.communicate(timeout=20)

    def _is_marked(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            return self.mark.items() <= process.environ().items() and process.status() != psutil.STATUS_ZOMBIE
        return False
