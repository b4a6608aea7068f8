"""A rank does not wait for ever for one that is no longer there."""

import contextlib
import os
import threading
import time
from pathlib import Path

from pipeline.config import PeerError
from pipeline.elastic.generations import Member
from pipeline.elastic.process_groups import ProcessGroups
from pipeline.heartbeat import Heartbeat, write_exit_reason

LOOK_SECONDS = 1.0
# How long a rank may neither compute nor get on in a group that has lost a member: longer than it may take to form one.
HUNG_SECONDS = 10.0
# The CPU time that a thread which hangs may take meanwhile.
LITTLE_SECONDS = 0.1


class Lookout:
    """Looks, from a thread beside the training, whether that waits in vain."""

    def __init__(self, member: Member, groups: ProcessGroups, heartbeat: Heartbeat):
        self._member, self._groups, self._heartbeat = member, groups, heartbeat
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._since, self._at = time.monotonic(), (-1, 0, 0.0)

    def run(self) -> None:
        """Look until the process ends, or the store is gone."""
        with contextlib.suppress(PeerError):
            while True:
                time.sleep(LOOK_SECONDS)
                self._look()

    def _look(self) -> None:
        found = self._member.waits_in_vain()
        number, beats, seconds = self._groups.number, self._heartbeat.beats, time.clock_gettime(self._clock)
        if found is None or found[0] != number or self._at[:2] != (number, beats) or seconds > self._at[2] + LITTLE_SECONDS:
            self._since, self._at = time.monotonic(), (number, beats, seconds)
        if found is not None and found[1]:
            # No connection is closed by a silent machine.
            self._groups.shut(found[0])
        if time.monotonic() > self._since + HUNG_SECONDS:
            # gloo (torch 2.14) may miss the end of a connection on which it is about to send, and waits on.
            folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
            write_exit_reason(folder, "Connection closed by a peer, and gloo waits on", 1)
            os._exit(1)
