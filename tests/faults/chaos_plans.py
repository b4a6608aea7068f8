"""What a campaign does, and when: it follows from the seed alone."""

import random

from tests.faults.chaos_faults import BETWEEN, ENDING, PASSING, Fault


class Plans:
    """What is done in the experiments of a campaign, one after the other: of every kind once before any comes again."""

    def __init__(self, seed: int, mounts: bool):
        self._dice = random.Random(f"plans/{seed}")
        ending = ENDING if mounts else tuple(kind for kind in ENDING if kind != "disk-full")
        self._packs = {"passing": PASSING, "ending": ending, "between": BETWEEN}
        self._left: dict[str, list[str]] = {name: [] for name in self._packs}

    def _fault(self, pack: str, whens: tuple[str, ...]) -> Fault:
        if not self._left[pack]:
            self._left[pack] = self._dice.sample(self._packs[pack], len(self._packs[pack]))
        return Fault(self._left[pack].pop(), self._dice.choice(whens), self._dice.random(), self._dice.random())

    def __next__(self) -> list[tuple[list[Fault], list[Fault]]]:
        """The starts of the next experiment: faults while it runs, the last of which ends it, and faults before the next start."""
        starts: list[tuple[list[Fault], list[Fault]]] = []
        for _ in range(self._dice.choice((1, 2, 2, 3))):
            live = [self._fault("passing", ("early", "step", "step")) for _ in range(self._dice.choice((0, 1, 2, 2)))]
            live = sorted(live, key=lambda one: (one.when, one.far))
            live.append(self._fault("ending", ("early", "step", "step", "step", "last", "publishing")))
            starts.append((live, [self._fault("between", ("between",)) for _ in range(self._dice.choice((0, 1, 1, 2)))]))
        return starts


def plan_of(seed: int, mounts: bool, number: int) -> list[tuple[list[Fault], list[Fault]]]:
    """The plan of one experiment of a campaign, counted from 1."""
    plans = Plans(seed, mounts)
    return [next(plans) for _ in range(number)][-1]
