"""Ranks that are lost and come back beside others that go on."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.losses import SLOW_MODEL
from tests.faults.elastic import campaign, lost_steps
from tests.faults.test_chaos import seed
from tests.kit.experiment import LONGER, Experiment
from tests.kit.trainings import mlflow_runs, ranks_of, same_figures, starting_no_rank, status, wait_for_step, weights
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]
# The experiment of `baseline`, on four ranks that may be lost.
ELASTIC = LONGER | {
    "dist__world_size": 4,
    "dist__batch_size_per_gpu": None,
    "dist__global_batch": 96,
    "dist__elastic": True,
    "tracking__log_every_steps": None,
}


LOST_LINE = r"rank \d was ended by SIGKILL in step \d+; it is started again, and whoever is left goes on \(log: (\S+/lost_\d/\d/\w+\.log)\)"


def wait_for_ranks(experiment: Experiment, number: int) -> None:
    """Return once the newest group has so many ranks."""
    until(lambda: experiment.journal("ranks")[-1:] and experiment.journal("ranks")[-1]["ranks"] == number, every_seconds=0.02)


@pytest.mark.fault(36, "of four elastic ranks, SIGKILL of the one that writes, and later of two at once; all come back")
def test_the_others_go_on_without_a_lost_rank_and_it_comes_back(
    baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    experiment.set(**ELASTIC).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 30, process)
    before = ranks_of(process)
    with starting_no_rank(process):
        before[0].kill()
        wait_for_ranks(experiment, 3)
    wait_for_ranks(experiment, 4)
    wait_for_step(experiment, 80, process)
    assert before[1:] == ranks_of(process)[1:]
    for one in ranks_of(process)[1:3]:
        one.kill()
    wait_for_step(experiment, 150, process)
    wait_for_ranks(experiment, 4)
    assert before[3] == ranks_of(process)[3]
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    logs = re.findall(LOST_LINE, said)
    assert len(logs) == 3 and all((experiment.folder / log).is_file() for log in logs)
    groups = [(line["ranks"], line["step"]) for line in experiment.journal("ranks")]
    assert re.findall(r"(\d) ranks? from step (\d+) on", said) == [(str(ranks), str(step)) for ranks, step in groups]
    assert not lost_steps(experiment)
    same_figures(experiment, baseline)
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FINISHED"]
    kept = sorted(path.parent.parent.name for path in (experiment.run_folder / "logs").glob("*/*/attempt_0/lost_*/*/stderr.log"))
    assert kept == ["lost_0", "lost_1", "lost_2"]
    (log,) = (experiment.run_folder / "logs").glob("*/torchrun.log")
    assert not re.search("terminate called|exit barrier", log.read_text())
    record_property("happened", f"no step lost, bit-equal, groups of {[line['ranks'] for line in experiment.journal('ranks')]} ranks")


@pytest.mark.fault(36, "of four elastic ranks all are lost; SIGKILL of one and SIGTERM at once; the rest without elastic on two")
def test_a_stop_amid_a_loss_saves_and_all_ranks_may_be_lost(baseline: Experiment, experiment: Experiment, record_property: Note) -> None:
    experiment.set(**ELASTIC).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 45, process)
    for one in ranks_of(process):
        one.kill()
    wait_for_step(experiment, 90, process)
    ranks_of(process)[0].kill()
    process.terminate()
    asked_at = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    stopped_at, seconds = status(experiment)["step"], time.monotonic() - asked_at
    assert f"stopped on request at step {stopped_at}" in said
    (again,) = [line for line in experiment.journal("ranks")[1:] if line["anew"]][:1]
    assert re.search(rf"no rank has the weights any more; \d ranks? from step {again['step']} on", said), said
    assert stopped_at >= 90
    assert not psutil.pid_exists(process.pid)
    experiment.set(**LONGER).run("train")
    same_figures(experiment, baseline)
    record_property("happened", f"stopped {seconds:.1f} s after the signal at step {stopped_at}, bit-equal in the end")


def test_where_ranks_cannot_go_on_it_is_said_and_all_start_again(baseline: Experiment, experiment: Experiment) -> None:
    experiment.set(**LONGER, dist__elastic=True, dist__lanes_per_rank=[2, 2]).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 30, process)
    ranks_of(process)[1].kill()
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    why = "lanes_per_rank: [2, 2] is for a number of ranks that stays"
    assert f"dist.elastic: {why}; where one rank is lost, all start again from the newest checkpoint" in said
    assert "starting again from " in said
    same_figures(experiment, baseline)


@pytest.mark.fault(5, "an elastic rank becomes half as fast; lanes move away from it")
def test_lanes_move_away_from_a_rank_that_becomes_slow(experiment: Experiment, tmp_path: Path, record_property: Note) -> None:
    digests: list[str] = []
    for name, shares in (("auto", "auto"), ("equal", None)):
        one = experiment if name == "auto" else Experiment(tmp_path / name)
        one.folder.mkdir(exist_ok=True)
        (one.folder / "mine.py").write_text(SLOW_MODEL)
        shape = ELASTIC | {"model__name": "mine.py:build", "train__epochs": 2, "dist__lanes": 16, "dist__lanes_per_rank": shares}
        one.with_database().set(**shape | {"tracking__log_every_steps": 8}).run("prepare")
        process = one.start("train", SLOW_FILE=str(one.folder / "slow"))
        wait_for_step(one, 32, process)
        (one.folder / "slow").touch()
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
        digests.append(weights(one))
    assert digests[0] == digests[1]
    moved = [line["per_rank"] for line in experiment.journal("lanes")]
    # What a busy machine makes of the other three is chance.
    assert moved[-1][3] < 4
    record_property("happened", f"shares {moved}, bit-equal")


@pytest.mark.fault(5, "of three elastic ranks SIGSTOP of one for good, and SIGKILL of another, with a timeout of 5 s")
def test_ranks_that_wait_for_a_group_do_not_hide_one_that_hangs(experiment: Experiment, record_property: Note) -> None:
    experiment.set(**ELASTIC | {"dist__world_size": 3, "dist__timeout_seconds": 5}).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 30, process)
    _, hung, lost = ranks_of(process)
    hung.suspend()
    lost.kill()
    began_at = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 6, said
    # Ranks of a group have their numbers in the order in which they were ready.
    assert re.search(r"rank \d is stopped \(SIGSTOP\) in step", said), said
    stacks = "".join(one.read_text() for one in (experiment.run_folder / "logs").glob("*/*/attempt_0/*/stacks.log"))
    assert f"process {hung.pid}: stopped" in stacks
    record_property("happened", f"exit 6 after {time.monotonic() - began_at:.1f} s; the rank that hung named")


@pytest.mark.fault(6, "the agent of elastic ranks cannot make a folder for what a lost one has left, and fails")
def test_an_agent_that_fails_is_no_stop_that_somebody_asked_for(experiment: Experiment, record_property: Note) -> None:
    experiment.set(**ELASTIC | {"dist__world_size": 2}).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 30, process)
    (attempt,) = (experiment.run_folder / "logs").glob("*/*/attempt_0")
    (attempt / "lost_0").touch()
    ranks_of(process)[1].kill()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 6, said
    assert f"torchrun's agent failed: FileExistsError: [Errno 17] File exists: '{attempt / 'lost_0'}'" in said
    ended = status(experiment)
    assert (ended["outcome"], ended["step"]) == ("failed", int(ended["checkpoint"][-20:-12])), "the rank that was left has saved"
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FAILED"]
    record_property("happened", f"exit 6 with the agent's own error; step {ended['step']} saved")


@pytest.mark.chaos
def test_random_losses_and_gains_change_no_bit(tmp_path: Path) -> None:
    found = campaign(tmp_path, seed(), 12, ranks=3, epochs=6)
    print(found.done, found.seconds)
    assert not found.violations
    assert found.done.total() >= 6
