"""Full disks, damaged checkpoints, and kills in the middle of writing one: there is always a good one, and it is found."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.test_rank_faults import status, with_fault
from tests.kit.experiment import LONGER, ROOT, Experiment
from tests.kit.faulty import fill
from tests.kit.trainings import experiment_steps, mlflow_runs, same_figures, wait_for_step

Note = Callable[[str, object], None]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 MB."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("every_steps", [20, 1000], ids=["in a checkpoint", "in the journal"])
@pytest.mark.fault(8, "the disk is full, for a checkpoint or for the journal; then there is room again")
def test_a_full_disk_ends_with_4_and_it_goes_on_once_there_is_room(
    baseline: Experiment, small_disk: Path, every_steps: int, record_property: Note
) -> None:
    experiment = Experiment(small_disk).set(**LONGER | {"checkpoint__every_steps": every_steps})
    experiment.run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 50, process)
    before = status(experiment)["outcome"]
    filler = fill(small_disk)
    said, _ = process.communicate(timeout=120)
    assert (before, process.returncode) == ("running", 4), said
    assert "No space left on device" in said
    assert "bytes are needed" in said
    assert "starting again" not in said
    found = status(experiment)
    assert (found["outcome"], found["exit_code"]) == ("machine", 4)
    if every_steps == 20:
        assert Path(found["checkpoint"]).name in ("step-00000040.safetensors", "step-00000060.safetensors")
        assert not list(experiment.run_folder.glob("checkpoints/.*"))
    filler.unlink()
    said = experiment.run("train")
    assert every_steps != 20 or f"going on from {found['checkpoint']}" in said
    experiment.run("sync")
    same_figures(experiment, baseline)
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FINISHED"]
    record_property("happened", f"exit 4: {found['cause'][-70:]}; with room again bit-equal, one run FINISHED")


@pytest.mark.slow
@pytest.mark.fault(8, "the disk is full when the trained model is written")
def test_a_disk_that_is_full_for_the_model_costs_no_step(baseline: Experiment, small_disk: Path, record_property: Note) -> None:
    experiment = Experiment(small_disk).set(**LONGER)
    experiment.run("prepare")
    said = with_fault(experiment, "full:0:0", 4)
    assert said.count("No space left on device: ") == 1, said
    assert re.search(r"bytes are needed, [\d,]+ are free", said), said
    assert not (small_disk / "models").exists()
    kept = status(experiment)["checkpoint"]
    assert Path(kept).name == f"step-{experiment_steps(baseline):08d}.safetensors"
    (experiment.run_folder / "filler").unlink()
    assert f"going on from {kept}" in experiment.run("train")
    experiment.run("sync")
    same_figures(experiment, baseline)
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FINISHED"]
    record_property("happened", "exit 4 with the bytes needed and free; with room again it only writes the model, bit-equal")


@pytest.mark.fault(8, "the disk is full while prepare writes")
def test_prepare_leaves_nothing_half_written_on_a_full_disk(small_disk: Path, record_property: Note) -> None:
    experiment = Experiment(small_disk).set(**LONGER)
    filler = fill(small_disk)
    filler.write_bytes(filler.read_bytes()[: -4 << 20])
    said = experiment.run("prepare", expect=4)
    assert "bytes are needed" in said
    assert [path for path in (small_disk / "data").rglob("*") if path.is_file()] == []
    filler.unlink()
    experiment.run("prepare")
    record_property("happened", "exit 4 with the bytes needed and free, nothing left; with room it prepares")


@pytest.mark.slow
@pytest.mark.fault(8, "the disk for MLflow's artifacts is full")
def test_artifacts_that_do_not_fit_are_sent_later(experiment: Experiment, small_disk: Path, record_property: Note) -> None:
    (experiment.folder / "mlartifacts").symlink_to(small_disk)
    filler = fill(small_disk)
    experiment.run("prepare")
    said = experiment.run("train")
    assert "MLflow does not have all of it yet" in said
    assert "No space left on device" in said
    filler.unlink()
    assert "MLflow has all of it" in experiment.run("sync")
    assert list(small_disk.rglob("receipt.json"))
    record_property("happened", "exit 0 with one warning; after sync they are there")


@pytest.mark.slow
@pytest.mark.fault(9, "the newest checkpoint cut short; later one bit of it flipped")
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_taken(
    baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    for step in (70, 150):
        process = experiment.start("train")
        wait_for_step(experiment, step, process)
        process.terminate()
        assert process.wait(60) == 75
        process.communicate()
        path = Path(status(experiment)["checkpoint"])
        content = bytearray(path.read_bytes())
        if step == 70:
            path.write_bytes(content[:-1000])
        else:
            content[len(content) // 2] ^= 8
            path.write_bytes(content)
        process = experiment.start("train")
        wait_for_step(experiment, step + 20, process)
        process.terminate()
        said, _ = process.communicate(timeout=60)
        assert f"{path} is damaged" in said
        assert f"going on from {path.with_name('step-00000060.safetensors' if step == 70 else 'step-00000140.safetensors')}" in said
    experiment.run("train")
    same_figures(experiment, baseline)
    record_property("happened", "refused by its hash, said so, the one before taken; bit-equal")


@pytest.mark.slow
@pytest.mark.fault(10, "all checkpoints emptied; then removed, with their list")
def test_without_a_good_checkpoint_nothing_is_started_from_nothing(experiment: Experiment, record_property: Note) -> None:
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 50, process)
    process.terminate()
    process.communicate(timeout=60)
    for path in experiment.run_folder.glob("checkpoints/step-*"):
        path.write_bytes(b"")
    lines = (experiment.run_folder / "journal.jsonl").read_text().count("train/loss")
    said = experiment.run("train", expect=4)
    assert "no good checkpoint is left of 2; move" in said
    for path in (experiment.run_folder / "checkpoints").iterdir():
        path.unlink()
    said = experiment.run("train", expect=4)
    assert "no good checkpoint is left, and the journal tells of some; move" in said
    assert "from step 0 again" not in said
    assert (experiment.run_folder / "journal.jsonl").read_text().count("train/loss") == lines
    record_property("happened", "exit 4: no good checkpoint is left of 2; nothing was trained")


# Each save is done by a child, as autograd does not survive a fork: one left alone, and one for every open, rename, removal and fsync,
# which kills itself before it; another then restores what there is, and goes on to the end.
KILLED_WHILE_SAVING = """
import json, os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from tests.unit.training.test_checkpoint import SingleNode, descend, parts
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.checkpoint_file import weights_sha256
from pipeline.training.state import State

def save(folder, told):
    torch.set_num_threads(1)
    model, optimizer = parts()
    checkpoints = Checkpoints(folder, 2, SingleNode(), executor=ThreadPoolExecutor(1))
    begin = checkpoints.restore(State(model, optimizer))
    digests = {begin: weights_sha256(model.state_dict())}
    for step in range(begin + 1, 5):
        descend(model, optimizer, range(step - 1, step))
        digests[step] = weights_sha256(model.state_dict())
        checkpoints.save_best(State(model, optimizer), step, step / 10)
        checkpoints.save(step, State(model, optimizer))
    checkpoints.finish()
    told.write_text(json.dumps([begin, digests]))

def child(work):
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def killed(folder, left):
    def tick(event, arguments):
        nonlocal left
        if event in ("open", "os.rename", "os.remove") and str(folder) in str(arguments) or event == "fsync":
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
    fsync = os.fsync
    os.fsync = lambda file: (tick("fsync", ()), fsync(file))
    sys.addaudithook(tick)
    save(folder, root / "nothing")

root = Path(sys.argv[1])
# What torch imports when it is first used takes each child seconds.
parts()[1].step()
assert child(lambda: save(root / "whole", root / "expected")) == 0
_, expected = json.loads((root / "expected").read_text())
count = least = 0
while True:
    count += 1
    folder = root / str(count)
    if child(lambda: killed(folder, count)) == 0:
        break
    assert child(lambda: save(folder, root / "told")) == 0
    begin, digests = json.loads((root / "told").read_text())
    assert digests.items() <= expected.items() or begin == 0, (count, begin)
    assert digests["4"] == expected["4"], count
    # Never less than what was whole before this kill.
    assert begin >= least, (count, begin, least)
    least = begin
assert least >= 3
print(count - 1)
"""


@pytest.mark.fault(11, "a process saving four checkpoints and best models, killed before every open, fsync, rename and removal in turn")
def test_a_kill_anywhere_in_a_save_leaves_a_loadable_checkpoint(tmp_path: Path, record_property: Note) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40
    record_property("happened", f"{done.stdout.strip()} kills; always one loadable, never one step less, always the same bits in the end")
