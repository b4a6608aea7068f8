"""Lanes by the speed of ranks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.heartbeat import Heartbeat
from pipeline.parallel.lanes import Lanes, Task
from pipeline.parallel.shares import TIMES, by_speed, seconds_of, shares
from pipeline.ranks import Ranks
from tests.unit.parallel.test_task import made


@pytest.mark.parametrize(
    ("lanes", "seconds", "expected"),
    [
        (4, [1.0, 1.0], [2, 2]),
        (4, [1.0, 3.0], [3, 1]),
        (8, [1.5, 1.0, 1.0], [2, 3, 3]),
        (7, [1.0, 1.0], [4, 3]),
        # However slow it is.
        (6, [1.0, 1000.0, 1.0], [3, 1, 2]),
        (3, [5.0, 1.0, 1.0], [1, 1, 1]),
    ],
)
def test_the_slowest_rank_is_done_as_early_as_possible(lanes: int, seconds: list[float], expected: list[int]) -> None:
    assert shares(lanes, seconds) == expected


class Beats(Heartbeat):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__(None)
        self.count = 0

    def computing(self, step: int | None = None) -> None:
        self.count += 1


def slowed(task: Task, seconds: float) -> Task:
    @contextmanager
    def slowly() -> Iterator[None]:
        time.sleep(seconds)
        yield

    return replace(task, autocast=slowly)


def test_a_slow_rank_gets_fewer_and_all_ranks_agree(thread_ranks: Callable[..., list[Any]]) -> None:
    def chosen(group: Ranks) -> list[int]:
        return by_speed(Lanes([2, 2], group.rank, 20), slowed(made(), (0.03, 0.2)[group.rank]), group).per_rank

    assert thread_ranks(2, chosen) == [[3, 1], [3, 1]]


def test_the_model_is_as_it_was() -> None:
    task = made(dropout=0.5)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    heartbeat = Beats()
    assert seconds_of(0, slowed(task, 0.01), heartbeat) >= 0.01
    # A watchdog would take it for hung that does not beat.
    assert heartbeat.count == 1 + TIMES
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
    assert all(parameter.grad is None for parameter in task.model.parameters())
