"""The restart policy: whether failed ranks are started again."""

from pipeline.launch.failures import Failure


class RestartPolicy:
    """Restarts while the failing step advances; stops after LIMIT restarts without progress or two deterministic failures in one step."""

    LIMIT = 3

    def __init__(self, ranks: int = 1) -> None:
        self._furthest, self._limit = -1, self.LIMIT * ranks
        self._failed_at: set[int] = set()
        # Restarts without progress by machine: with another's failure mostly comes one of ours.
        self._in_vain: dict[str | None, int] = {}

    def reason_to_stop(self, failure: Failure) -> str | None:
        """Return why the ranks are not to be started again, or None."""
        if failure.step > self._furthest:
            self._furthest = failure.step
            self._failed_at.clear()
            self._in_vain.clear()
        else:
            self._in_vain[failure.host] = self._in_vain.get(failure.host, 0) + 1
        if failure.deterministic:
            if failure.step in self._failed_at:
                return f"step {failure.step} has failed twice" if failure.step >= 0 else "it has failed twice before its first step"
            self._failed_at.add(failure.step)
        if self._in_vain.get(failure.host, 0) >= self._limit:
            return f"{self._in_vain[failure.host]} starts in a row got no further than step {max(self._furthest, 0)}"
        return None
