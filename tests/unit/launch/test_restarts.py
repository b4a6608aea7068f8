"""When it is enough: whether failed ranks are started again."""

from pipeline.launch.failures import Failure
from pipeline.launch.restarts import RestartPolicy


def lost(step: int, exit_code: int = -9, host: str | None = None) -> Failure:
    return Failure(0, exit_code, "", 0, step, host=host)


def test_a_job_that_gets_on_is_started_again_without_end() -> None:
    patience = RestartPolicy()
    assert [patience.reason_to_stop(lost(step)) for step in range(0, 200, 2)] == [None] * 100


def test_three_starts_that_got_no_further_are_enough() -> None:
    patience = RestartPolicy()
    assert [patience.reason_to_stop(lost(step)) for step in (30, 20, 30)] == [None] * 3
    assert patience.reason_to_stop(lost(10)) == "3 starts in a row got no further than step 30"
    assert patience.reason_to_stop(lost(31)) is None, "it got further after all"
    assert [patience.reason_to_stop(lost(31)) for _ in range(2)] == [None] * 2


def test_another_machines_failures_are_counted_apart() -> None:
    patience = RestartPolicy()
    assert [patience.reason_to_stop(lost(30, host=host)) for host in (None, "b", None, "b", None)] == [None] * 5
    assert patience.reason_to_stop(lost(30, host="b")) == "3 starts in a row got no further than step 30"


def test_a_step_that_fails_twice_from_within_is_enough() -> None:
    patience = RestartPolicy()
    assert patience.reason_to_stop(lost(12, exit_code=1)) is None
    assert patience.reason_to_stop(lost(11, exit_code=1)) is None
    assert patience.reason_to_stop(lost(12, exit_code=-11)) == "step 12 has failed twice"
    assert RestartPolicy().reason_to_stop(lost(12, exit_code=-9)) is None
