"""A rank hears of newer generations, and does not wait for ever for one that is no longer there."""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Generator
from pathlib import Path

from pipeline.config import PeerError
from pipeline.elastic.generations import Member
from pipeline.elastic.process_groups import ProcessGroups
from pipeline.heartbeat import Heartbeat, write_exit_reason
from pipeline.timeouts import ENDING_SECONDS

# Rank 0 tells the others of a newer generation. Not from the training itself: an answer waits until a CPU is free.
LOOK_SECONDS, FIRST_LOOK_SECONDS = 1.0, 0.2
# How long a rank may neither compute nor get on in a group that has lost a member; and how much longer where it does not hear of it.
HUNG_SECONDS, DEAF_SECONDS = 2.0, 10.0
# And so many times as long as it has waited before.
TIMES_LONGEST = 3
# The CPU time that a thread which hangs may take meanwhile.
LITTLE_SECONDS = 0.1


class Lookout:
    """Looks, from a thread beside the training, for newer generations, and whether the training waits in vain."""

    def __init__(self, member: Member, groups: ProcessGroups, heartbeat: Heartbeat, in_vain: threading.Event):
        self._member, self._groups, self._heartbeat, self._in_vain = member, groups, heartbeat, in_vain
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._since = self._looked_at = time.monotonic()
        self._at, self._longest, self._got_on_at = (-1, 0, 0.0), 0.0, self._since
        self._over = threading.Event()

    @contextlib.contextmanager
    def looking(self) -> Generator[None]:
        """Look until the block ends, or the store is gone."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(ENDING_SECONDS)

    def _run(self) -> None:
        with contextlib.suppress(PeerError):
            while not self._over.wait(self._groups.ranks.on_rank_zero(lambda: FIRST_LOOK_SECONDS, LOOK_SECONDS)):
                self._look()

    def _look(self) -> None:
        found = self._member.waits_in_vain()
        number, beats, seconds = self._groups.number, self._heartbeat.beats, time.clock_gettime(self._clock)
        now, before = time.monotonic(), self._looked_at
        self._looked_at = now
        gets_on = self._at[:2] != (number, beats) or seconds > self._at[2] + LITTLE_SECONDS
        # This process was stopped too, if it looks so late.
        if gets_on or found is None or found[0] != number or now > before + 3 * LOOK_SECONDS:
            if found is None and not gets_on:
                self._longest = max(self._longest, now - self._got_on_at)
            self._since, self._at = now, (number, beats, seconds)
        if gets_on:
            self._got_on_at = now
        if found is not None and found[1]:
            # No connection is closed by a silent machine.
            self._groups.shut(found[0])
        if now > self._since + HUNG_SECONDS:
            # If a slow peer would still have come, it comes to the next group.
            self._in_vain.set()
        if now > self._since + HUNG_SECONDS + max(DEAF_SECONDS, TIMES_LONGEST * self._longest):
            # It waits within torch; where, its log will tell.
            faulthandler.dump_traceback(all_threads=True)
            folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
            write_exit_reason(folder, "Connection closed by a peer, and gloo waits on", 1)
            os._exit(1)
