"""What ranks agree on between two steps."""

import contextlib
from collections.abc import Callable

from pipeline.config import PeerError
from pipeline.elastic.generations import Member
from pipeline.ranks import Ranks
from pipeline.training.stopping import Stop

NOTHING, REGROUP, STOP = range(3)


class Regroup(Exception):
    """All ranks have agreed, between two steps, to enter a newer generation."""


class Reshare(Exception):
    """All ranks have agreed, between two steps, to share the lanes out anew."""


class Agreed(Stop):
    """What ranks agree on between two steps: to stop, to enter a newer generation, or to share the lanes out anew."""

    def __init__(self, ranks: Ranks, alarm_seconds: int, member: Member, leads: bool):
        super().__init__(ranks, alarm_seconds)
        # A signal stops the training on the leader; another machine's ranks leave it, and the others go on.
        self._member, self._leads, self._is_leaving = member, leads, False
        self._wait: Callable[[], int] | None = None
        # Set, on all ranks alike, where other shares of the lanes would be faster.
        self.reshares = False

    def gives_up(self, has_weights: bool) -> bool:
        """True between two groups if a signal has asked this rank to stop, or to leave, and it has nothing that is worth saving."""
        return self._asked and (not self._leads or not has_weights)

    def agreed(self) -> bool:
        """Return True if all ranks stop here; raises Regroup or Reshare, on all ranks, if they do that instead."""
        return self._answer_after(self.reshares)

    def stops(self) -> bool:
        """The same within a validation, after which lanes may be shared out."""
        return self._answer_after(False)

    def _answer_after(self, reshares: bool) -> bool:
        answer, self._wait = self._wait() if self._wait else NOTHING, None
        if answer == REGROUP:
            raise Regroup
        if reshares and answer == NOTHING:
            self.reshares = False
            raise Reshare
        if self._asked and not self._leads and not self._is_leaving:
            self._is_leaving = True
            with contextlib.suppress(PeerError):
                self._member.leave()
        outdated = self._ranks.on_rank_zero(self._member.is_outdated, False)
        self._wait = self._ranks.start_maximum(STOP if self._asked and self._leads else REGROUP if outdated else NOTHING)
        if answer == STOP:
            self._begin_to_save()
        return answer == STOP

    def forget(self) -> None:
        """Drop what was asked and found in a group that is no more."""
        self._wait, self.reshares = None, False

    def close(self) -> None:
        """Wait for the last question."""
        if self._wait:
            self._wait()
        self._wait = None
        super().close()
