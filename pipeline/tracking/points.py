"""What MLflow has of a run's figures: a value that a cut journal gets again has another time, and MLflow would keep it beside the first."""

from typing import Any

# An evaluation that is repeated counts anew.
ANEW = "test/"


class Points:
    """The newest time and value of each metric at each step; nothing is known before it is loaded."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], tuple[int, float]] = {}

    def load(self, client: Any, run_id: str) -> None:
        """Ask MLflow, which takes a request for each metric."""
        found: dict[tuple[str, int], tuple[int, float]] = {}
        for name in client.get_run(run_id).data.metrics:
            for point in client.get_metric_history(run_id, name):
                found[name, point.step] = point.timestamp, point.value
        self._found = found

    def forget(self) -> None:
        """Begin with a run that has none."""
        self._found = {}

    def has(self, name: str, step: int) -> bool:
        """Whether MLflow has a value of this step."""
        return (name, step) in self._found

    def is_new(self, name: str, step: int) -> bool:
        """Whether a value of this step is to be sent."""
        return name.startswith(ANEW) or not self.has(name, step)

    def known(self, name: str, step: int, new: tuple[int, float]) -> tuple[int, float]:
        """Return time and value as MLflow has them, or the new ones."""
        return new if self.is_new(name, step) else self._found[name, step]
