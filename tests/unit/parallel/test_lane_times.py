"""The first steps tell how long a lane takes; long ones are not tried at once."""

import logging
import time

import pytest
from torch import Tensor

from pipeline.parallel.lane_groups import LONG_SECONDS, TIMED_STEPS
from tests.unit.parallel.test_lane_groups import EXACT, alone, batch, begun, found, timed


def test_long_lanes_are_not_tried(caplog: pytest.LogCaptureFixture) -> None:
    """Much is new in the first step, which may be long alone."""
    with caplog.at_level(logging.INFO):
        assert timed(begun(EXACT["linear"]()), 2 * LONG_SECONDS, LONG_SECONDS).of_step(0) == [range(4)]
        assert "each takes" not in caplog.text
        long = timed(begun(EXACT["linear"]()), 2 * LONG_SECONDS, 1.1 * LONG_SECONDS)
        assert long.of_step(0) == long.of_step(1) == alone(4)
    assert caplog.text.count("lanes are computed one after another: each takes 0.22 s") == 1


def test_the_first_own_lane_is_timed() -> None:
    """In what it computes; it may wait for others."""

    def busy(step: int, lane: int) -> tuple[Tensor, Tensor]:
        until = time.thread_time() + (0.1 if lane == 0 else 0)
        while time.thread_time() < until:
            pass
        time.sleep(0.5)
        return batch(step, lane)

    groups = begun(EXACT["linear"](), 2, batch=busy)
    for step in range(TIMED_STEPS):
        assert groups.of_step(step) == alone(2)
        found(groups, step, alone(2))
    assert len(groups._seconds) == TIMED_STEPS
    assert all(0.1 <= seconds < 0.4 for seconds in groups._seconds)
