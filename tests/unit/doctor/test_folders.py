"""Checks of the disk."""

import subprocess
from pathlib import Path

from pipeline.doctor import folders


def test_a_disk_without_room_is_wrong_and_named(tmp_path: Path) -> None:
    assert folders.disk(tmp_path / "runs", 1).kind == "ok"
    found = folders.disk(tmp_path / "runs", 1 << 60)
    assert found.kind == "wrong"
    assert f"{tmp_path}/runs" in found.text
    assert subprocess.run(found.fix.removeprefix("list what takes the room with "), shell=True).returncode == 0
