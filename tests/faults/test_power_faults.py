"""The power is cut for real while a training writes: its file system loses all that was not synced, and it goes on from the rest."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.runs import checkpoints
from pipeline.tracking import journal as journals
from tests.kit.experiment import LONGER, Experiment
from tests.kit.power import Disk
from tests.kit.trainings import mlflow_runs, same_figures, wait_for_step
from tests.kit.waiting import until

Note = Callable[[str, object], None]
EVERY_STEPS = 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.detach()


def step_of(path: str | None) -> int:
    return int(Path(path).stem.partition("-")[2]) if path else 0


def journals_of(experiment: Experiment) -> Iterator[Path]:
    return (experiment.folder / "runs").glob("*/journal.jsonl")


def has_reached(journal: Path, step: int) -> bool:
    """Return True if a journal has figures of this step, and the last checkpoint before it."""
    figures, saved = (journals.last(journal, kind).get("step", 0) for kind in ("metrics", journals.CHECKPOINT))
    return figures >= step and saved >= step // EVERY_STEPS * EVERY_STEPS


def trained_until_the_power_is_cut(experiment: Experiment, disk: Disk, step: int, **environment: str) -> tuple[int, str | None]:
    """Returns the step of the newest checkpoint that the journal told of, and the one that is left."""
    process = experiment.start("train", **disk.mark, **environment)
    # The last cut may have left zeros at the journal's end, which the start cuts off.
    until(lambda: any(has_reached(path, step) for path in journals_of(experiment)), process)
    saved = max(line["step"] for line in experiment.journal(journals.CHECKPOINT))
    disk.cut()
    disk.kill_all(process)
    disk.back()
    runs = list((disk.folder / "runs").glob("*"))
    return saved, checkpoints.newest(runs[0]) if runs else None


@pytest.mark.slow
@pytest.mark.fault(32, "the run's file system (ext4) shut down in the kernel without a last write, five times in one run and after it")
def test_a_power_cut_costs_no_checkpoint_and_no_bit(baseline: Experiment, disk: Disk, record_property: Note) -> None:
    experiment = Experiment(disk.folder).set(**LONGER)
    experiment.run("prepare")
    subprocess.run(["sync", "--file-system", experiment.params], check=True)
    left = None
    for step in (25, 41, 62, 100, 161):
        saved, left = trained_until_the_power_is_cut(experiment, disk, step)
        assert step_of(left) >= saved >= EVERY_STEPS
    said = experiment.run("train")
    assert f"going on from {left}" in said
    disk.cut()
    disk.back()
    # All that it said is true.
    same_figures(experiment, baseline)
    experiment.run("train")
    same_figures(experiment, baseline)
    experiment.run("sync")
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FINISHED"]
    record_property("happened", "each time the newest checkpoint that the journal told of was there; bit-equal, one run FINISHED")


@pytest.mark.slow
@pytest.mark.fault(32, "the power is cut as soon as prepare has ended")
def test_what_prepare_has_written_is_there_after_a_power_cut(disk: Disk, record_property: Note) -> None:
    experiment = Experiment(disk.folder).set(**LONGER)
    subprocess.run(["sync", "--file-system", experiment.params], check=True)
    experiment.run("prepare")
    disk.cut()
    disk.back()
    process = experiment.start("train", **disk.mark)
    wait_for_step(experiment, 10, process)
    disk.kill_all(process)
    record_property("happened", "all of it was there, and trains")


@pytest.mark.slow
def test_without_fsync_a_power_cut_would_have_cost_the_checkpoints(disk: Disk, tmp_path: Path) -> None:
    """The control: the same training on the same disk, but for a library in whose hands fsync does nothing."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    names = ("fsync", "fdatasync")
    (tmp_path / "lazy.c").write_text("\n".join(f"int {name}(int file) {{ (void)file; return 0; }}" for name in names))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "lazy.so", tmp_path / "lazy.c"], check=True)
    experiment = Experiment(disk.folder).set(**LONGER)
    experiment.run("prepare")
    subprocess.run(["sync", "--file-system", experiment.params], check=True)
    saved, left = trained_until_the_power_is_cut(experiment, disk, 62, LD_PRELOAD=str(tmp_path / "lazy.so"))
    assert step_of(left) < saved
