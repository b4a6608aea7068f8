"""Jobs whose size is who is there: they begin with fewer machines than they take, and go on with those that a loss leaves."""

import sys
from pathlib import Path

import psutil
import pytest

from tests.kit.experiment import Experiment
from tests.kit.leading import LONG, Job, digest, end

pytestmark = pytest.mark.slow
# One rank a machine, as these are one machine.
ONE_EACH = {"PET_NPROC_PER_NODE": "1"}
AUTO = LONG | {"dist__world_size": "auto", "dist__batch_size_per_gpu": None, "dist__global_batch": 192}


def sizes(experiment: Experiment) -> list[str]:
    """The world size of every start."""
    started = [line["tags"] for line in experiment.journal("started") if line["stage"] == "train"]
    return [tags["lockstep.world_size"] for tags in started]


@pytest.mark.fault(36, "a lost machine of three, in a job for one to three")
def test_a_lost_machine_costs_a_restart_with_fewer_and_no_bit(tmp_path: Path, record_property) -> None:
    job = Job(tmp_path, **AUTO)
    workers = [job.join(), job.join()]
    train = (sys.executable, "-m", "pipeline", "train", "--params", str(job.leading.params))
    leader = job.leading.start("lead", "--workers", "0:2", "--port", str(job.port), *train, **ONE_EACH)
    job.wait_for_steps(20)
    for process in [*psutil.Process(workers[0].pid).children(recursive=True), workers[0]]:
        process.kill()
    code, said = end(leader)
    assert code == 0, said
    assert "a machine was lost; beginning again with those that are there" in said
    assert end(workers[1], 15)[0] == 0
    workers[0].communicate()
    assert sizes(job.leading) == ["3", "2"]
    # As ranks that a person has asked for.
    alone = Experiment(tmp_path / "alone")
    alone.folder.mkdir()
    alone.set(**LONG).run("prepare")
    alone.run("train")
    assert digest(job.leading) == digest(alone)
    assert job.leading.run_folder.name == alone.run_folder.name
    record_property("happened", "begun again on two machines; the bits of one")


def test_a_job_without_machines_enough_is_not_begun_and_stops_when_asked(tmp_path: Path) -> None:
    job = Job(tmp_path, **AUTO)
    train = (sys.executable, "-m", "pipeline", "train", "--params", str(job.leading.params))
    worker = job.join()
    leader = job.leading.start("lead", "--workers", "2:3", "--port", str(job.port), *train, **ONE_EACH)
    assert leader.stdout is not None
    lines = iter(leader.stdout.readline, "")
    assert any("waiting for 3 to 4 machines" in line for line in lines)
    leader.terminate()
    code, said = end(leader, 30)
    assert code == 75, said
    assert "stopped on request while it waited for machines" in said
    assert end(worker, 15)[0] == 75
    assert not list(job.leading.folder.glob("runs/*"))


def test_a_range_of_machines_needs_a_size_that_follows_it(tmp_path: Path) -> None:
    job = Job(tmp_path, **LONG)
    refused = job.leading.run("lead", "--workers", "1:2", "true", expect=2)
    assert refused == "--workers: 1:2: a range needs dist.world_size: auto; or write a number\n"
    assert "'many' is no number of machines" in job.leading.run("lead", "--workers", "many", "true", expect=2)
