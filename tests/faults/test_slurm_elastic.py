"""Elastic on a real Slurm of four nodes: nodes are lost from a running job, and others join it."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.elastic import lost_steps
from tests.faults.test_elastic_faults import wait_for_ranks
from tests.faults.test_slurm_jobs import Job, four_nodes, lost, submit  # noqa: F401
from tests.kit.experiment import PACED, PACED_MODEL, ROOT, Experiment, clean_environment
from tests.kit.trainings import same_figures
from tests.kit.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.slurm]
Note = Callable[[str, object], None]


def join(where: str, folder: Path, slow: Path) -> "subprocess.Popen[str]":
    """Ask Slurm for one more node, and let it join."""
    folder.mkdir()
    (folder / "mine.py").write_text(PACED_MODEL)
    own = Experiment(folder).set(**PACED, dist__world_size="auto", dist__elastic=True)
    words = ("srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", sys.executable, "-m", "pipeline", "join", where, "--params")
    return subprocess.Popen([*words, str(own.params)], cwd=ROOT, env=clean_environment() | {"SLOW_FILE": str(slow)}, text=True)


@pytest.mark.fault(36, "of four elastic nodes of a real Slurm job a slurmd is killed with all its processes, then another; two join")
def test_nodes_of_a_running_job_are_lost_and_others_join_it(
    paced: Experiment,
    experiment: Experiment,
    tmp_path: Path,
    submit: Callable[..., Job],  # noqa: F811
    record_property: Note,
) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    (experiment.folder / "mine.py").write_text(PACED_MODEL)
    experiment.set(**PACED, dist__world_size="auto", dist__elastic=True).run("prepare")
    variables = f"--export=ALL,SLOW_FILE={slow},PET_NNODES=1:4,SLURM_NO_KILL=set"
    job = submit(experiment, "--nodes=4", "--no-kill", variables)
    job.reaches(20)
    wait_for_ranks(experiment, 4)
    where, seconds = re.findall(r"pipeline join (\S+)", job.log.read_text())[0], list[float]()
    with contextlib.ExitStack() as nodes_back:
        for left, node in ((3, sorted(job.nodes())[-1]), (2, sorted(job.nodes())[-2])):
            nodes_back.enter_context(lost(node, job.number))
            lost_at = time.monotonic()
            wait_for_ranks(experiment, left)
            seconds.append(time.monotonic() - lost_at)
        joined = [join(where, tmp_path / f"node-{number}", slow) for number in range(2)]
        wait_for_ranks(experiment, 4)
        slow.unlink()
        said = job.wait("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")
        assert job.fact("JobState") == "COMPLETED", said
        assert [one.wait(60) for one in joined] == [0, 0]
    assert job.fact("Restarts") == "0"
    assert not lost_steps(experiment)
    assert not list(experiment.folder.glob("runs/*/logs/*/*/attempt_0/lost_*")), "nobody was started again"
    same_figures(experiment, paced)
    until(lambda: said.count("is lost; the others go on") == 2)
    groups = [line["ranks"] for line in experiment.journal("ranks")]
    record_property("happened", f"bit-equal, groups of {groups} ranks; {seconds[0]:.1f} and {seconds[1]:.1f} s from the loss of a node on")
