"""A signal to one rank becomes one step at which all stop."""

import os
import signal
from collections.abc import Iterator

import pytest

from pipeline.ranks import Ranks
from pipeline.training.stopping import Stop

# The alarm is under test here.
pytestmark = pytest.mark.timeout(600, method="thread")

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.fixture
def stop(alone: Ranks) -> Iterator[Stop]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield Stop(alone, 75)
    signal.alarm(0)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_answered_one_question_later(stop: Stop, number: int) -> None:
    assert [stop.agreed() for _ in range(3)] == [False, False, False]
    os.kill(os.getpid(), number)
    assert [stop.agreed() for _ in range(3)] == [False, True, True]
    stop.close()


def test_a_signal_sets_an_alarm_once_and_whoever_stops_in_time_takes_it_back(stop: Stop) -> None:
    assert signal.alarm(0) == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert 74 <= signal.alarm(30) <= 75
    os.kill(os.getpid(), signal.SIGINT)
    assert 29 <= signal.getitimer(signal.ITIMER_REAL)[0] <= 30
    stop.agreed()
    stop.close()
    assert signal.alarm(0) == 0


def test_the_last_question_is_waited_for_before_the_group_is_left(stop: Stop) -> None:
    answered: list[bool] = []
    stop.agreed()
    wait = stop._answer
    assert wait is not None
    stop._answer = lambda: answered.append(wait()) or True
    stop.close()
    assert answered == [False]
    stop.close()
    assert answered == [False]


def test_once_all_have_agreed_the_alarm_is_for_a_rank_whose_agent_is_gone(stop: Stop) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    stop.agreed()
    assert 74 <= signal.getitimer(signal.ITIMER_REAL)[0] <= 75, "whom the others do not answer hangs"
    assert stop.agreed()
    assert signal.alarm(0) == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.alarm(0) == 0, "the request is the same"
    stop._asked = False
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.alarm(0) == 0, "one whom a peer had stopped is only now asked itself"
    # As where the agent has ended since, at which the kernel sends another signal.
    stop._agent = -1
    os.kill(os.getpid(), signal.SIGTERM)
    assert 74 <= signal.alarm(0) <= 75


def test_a_rank_that_was_left_alone_has_no_more_time_to_save_than_before(stop: Stop) -> None:
    stop._agent = -1
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.alarm(30)
    stop.agreed()
    assert stop.agreed()
    assert 29 <= signal.alarm(0) <= 30
    stop._asked = True
    assert stop.agreed()
    assert 74 <= signal.alarm(0) <= 75, "another rank was asked"
