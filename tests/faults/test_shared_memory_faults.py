"""A rank that is killed, and one that hangs, while ranks add up in shared memory: told as where they send messages."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.hardware.cgroup import usable_cpus
from tests.faults.test_rank_faults import fresh_ranks
from tests.kit.experiment import LONGER, Experiment
from tests.kit.skips import NOT_BOUND
from tests.kit.trainings import ranks_of, same_figures, status, wait_for_step

CPUS = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not 2 <= len(CPUS) == usable_cpus() or os.uname().machine != "x86_64", reason=NOT_BOUND),
]
Note = Callable[[str, object], None]


@pytest.fixture
def two_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What starts here has two CPUs, whoever else is bound to them."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    os.sched_setaffinity(0, CPUS[:2])
    yield
    os.sched_setaffinity(0, CPUS)


def sharing(experiment: Experiment) -> int:
    """How many ranks have said that they share memory, in all attempts."""
    return sum("summed in shared memory" in path.read_text() for path in experiment.run_folder.glob("logs/*/*/attempt_*/*/stderr.log"))


@pytest.mark.usefixtures("two_cpus")
@pytest.mark.fault(1, "SIGKILL of either rank while they share memory")
def test_the_peer_of_a_killed_rank_hears_of_it_and_both_start_again(
    baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    for step, victim in ((30, 0), (120, 1)):
        wait_for_step(experiment, step, process)
        old = ranks_of(process)
        old[victim].kill()
        fresh_ranks(process, old)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert all(f"rank {rank} was ended by SIGKILL in step" in said for rank in (0, 1)), said
    assert sharing(experiment) == 6
    same_figures(experiment, baseline)
    record_property("happened", "started again twice, bit-equal to a run that may have sent messages")


@pytest.mark.usefixtures("two_cpus")
@pytest.mark.fault(5, "SIGSTOP of rank 0 for good while they share memory, with a timeout of 5 s")
def test_a_stopped_rank_is_named_and_not_the_one_that_waits_for_it(experiment: Experiment, record_property: Note) -> None:
    experiment.set(**LONGER, dist__timeout_seconds=5).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 20, process)
    ranks_of(process)[0].suspend()
    started_at = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 6, said
    assert "rank 0 is stopped (SIGSTOP) in step" in said
    assert (status(experiment)["rank"], sharing(experiment)) == (0, 2)
    record_property("happened", f"exit 6 after {time.monotonic() - started_at:.0f} s, rank 0 named")
