"""Verify for real: a result is computed again, and what was altered, damaged or changed since is named."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import verify
from pipeline.config import Config, ConfigError, DataError, digest
from pipeline.files import Paths
from tests.kit.checkout import clone_of
from tests.kit.compose import free_port
from tests.kit.experiment import Experiment, clean_environment
from tests.kit.trainings import mlflow_runs
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
Copy = Callable[[], Experiment]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """Steps 5, 10, 15, 20 and 22 were saved, and the last two are kept."""
    experiment = Experiment(tmp_path_factory.mktemp("finished")).set().with_database()
    experiment.run("prepare")
    experiment.run("train")
    return experiment


@pytest.fixture
def copy(finished: Experiment, tmp_path: Path) -> Copy:
    """A copy of the finished experiment, to be altered."""
    return lambda: Experiment(Path(shutil.copytree(finished.folder, tmp_path / "copy")))


def alter(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def in_this_process(experiment: Experiment, result: Path | None = None, **asked: Any) -> int:
    """Verify what is refused before a rank starts."""
    asked = {"from_step": 0, "steps": None, "world_size": None} | asked
    return verify.run(Config(), Paths(experiment.params), result, False, **asked)


def test_a_true_receipt_is_bit_equal_on_any_ranks_and_leaves_nothing_behind(finished: Experiment) -> None:
    files = sorted(path for path in finished.folder.rglob("*") if path.is_file())
    said = finished.run("verify", "--all", "--world-size", "4")
    assert "bit-equal: 116 figures of steps 1 to 22, all tensors of step 20, all tensors of step 22, both digests, on 4 ranks" in said
    assert sorted(path for path in finished.folder.rglob("*") if path.is_file()) == files
    assert len(mlflow_runs(finished)) == 1


def test_all_runs_are_verified_with_the_data_of_their_seeds_also_with_a_leader(copy: Copy, tmp_path: Path) -> None:
    experiment = copy().set(seed=2)
    experiment.run("prepare")
    experiment.run("train")
    said = experiment.run("verify", "--all", "--steps", "12")
    assert said.count("bit-equal: 63 figures of steps 1 to 12, on 2 ranks") == 2, said
    assert not list(experiment.folder.glob("runs/*/verify*"))
    shutil.rmtree(experiment.folder / "data")
    port, worker = str(free_port()), Experiment(tmp_path / "worker")
    worker.folder.mkdir()
    worker.set()
    verify = (sys.executable, "-m", "pipeline", "verify", "--params", str(experiment.params), "--steps", "12")
    leader = experiment.start("lead", "--workers", "1", "--port", port, *verify)
    joined = worker.start("join", f"127.0.0.1:{port}")
    for process in (leader, joined):
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert process is joined or "bit-equal: 63 figures of steps 1 to 12, on 2 ranks" in said


def test_steps_behind_a_checkpoint_of_an_unfinished_run_are_computed_alone(copy: Copy) -> None:
    experiment = copy()
    (experiment.run_folder / "receipt.json").unlink()
    said = experiment.run("verify", str(experiment.run_folder), "--from-step", "20", "--world-size", "1")
    assert "computing steps 21 to 22" in said
    assert "bit-equal: 13 figures of steps 21 to 22, all tensors of step 22, on 1 rank" in said


def test_one_altered_digit_in_a_receipt_is_named(finished: Experiment, tmp_path: Path) -> None:
    receipt = tmp_path / "receipt.json"
    shutil.copy(finished.folder / "models" / "receipt.json", receipt)

    def change(values: dict[str, Any]) -> None:
        loss = values["epochs"][0]["train_loss"]
        values["epochs"][0]["train_loss"] = loss[:-5] + ("1" if loss[-5] == "0" else "0") + loss[-4:]
        values["best"]["validation_accuracy"] -= 0.1
        for name in ("weights_sha256", "model_sha256"):
            values[name] = ("1" if values[name][0] == "0" else "0") + values[name][1:]

    alter(receipt, change)
    said = finished.run("verify", str(receipt), "--world-size", "1", expect=1)
    assert f"{receipt}: diverged at step 11: train/loss: 0x1." in said
    for name in ("weights_sha256", "model_sha256", "best"):
        assert f"; {name}: " in said


def test_an_altered_setting_or_another_torch_is_not_comparable(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = copy()
    receipt = experiment.folder / "models" / "receipt.json"
    alter(receipt, lambda values: values["parameters"]["train"].update(learning_rate=0.06))
    assert in_this_process(experiment) == 4
    assert "not comparable because train.learning_rate was 0.05 and is 0.06\n" in capsys.readouterr().out

    def trained_by_another_torch(values: dict[str, Any]) -> None:
        values["parameters"]["train"]["learning_rate"] = 0.05
        values["identity"]["versions"]["torch"] = "2.11.0"

    alter(receipt, trained_by_another_torch)
    with pytest.raises(DataError, match=r"receipt.json: was altered: its fingerprint is \w{16}, and that of its identity \w{16}$"):
        in_this_process(experiment)
    alter(receipt, lambda values: values.update(fingerprint=digest(values["identity"])[:16]))
    assert in_this_process(experiment) == 4
    assert "not comparable because versions.torch was '2.11.0' and is '2.14.1" in capsys.readouterr().out


def test_a_flipped_bit_is_named_and_nothing_is_computed(copy: Copy) -> None:
    experiment = copy()
    for path in (experiment.run_folder / "checkpoints" / "step-00000020.safetensors", experiment.folder / "models" / "model.safetensors"):
        content = path.read_bytes()
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        with pytest.raises(DataError, match=rf"{path.name}.*SHA-256.*; nothing was computed$"):
            in_this_process(experiment)
        path.write_bytes(content)
    assert not (experiment.run_folder / "verify").exists()


def test_a_damaged_run_keeps_no_other_from_being_verified(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = copy()
    damaged = experiment.run_folder
    other = damaged.with_name("f" * 16)
    shutil.copytree(damaged, other)
    (damaged / "receipt.json").write_text("{}")

    def of_another_torch(values: dict[str, Any]) -> None:
        values["identity"]["versions"]["torch"] = "2.11.0"
        values["fingerprint"] = digest(values["identity"])[:16]

    alter(other / "receipt.json", of_another_torch)
    assert verify.run(Config(), Paths(experiment.params), None, True, from_step=0, steps=None, world_size=None) == 4
    said = capsys.readouterr()
    assert f"{damaged / 'receipt.json'}: is damaged" in said.err
    assert f"{other / 'receipt.json'}: not comparable because versions.torch" in said.out


def test_what_cannot_be_compared_is_refused(finished: Experiment) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({"from_step": 7}, r"^--from-step: .* has no checkpoint of step 7; it has those of \[20, 22\]$"),
        ({"world_size": 5}, r"^--world-size: 5 is more than the lanes of this result; give at most 4$"),
        (
            {"result": finished.folder / "nothing"},
            r"nothing: no such file or folder; name a receipt, or a run's folder such as .*, or train: dvc repro$",
        ),
        ({"from_step": 22}, r"^--from-step, --steps: .* has nothing to compare behind step 22 up to 22; name others$"),
    ]
    for words, said in asked:
        with pytest.raises(ConfigError, match=said):
            in_this_process(finished, **words)


def test_a_changed_line_in_the_loss_is_seen_in_the_first_step(finished: Experiment, tmp_path: Path) -> None:
    clone = clone_of(tmp_path / "clone")
    lanes = clone / "pipeline" / "parallel" / "lanes.py"
    before = lanes.read_text()
    lanes.write_text(before.replace("label_smoothing=self.label_smoothing)", "label_smoothing=self.label_smoothing) * 1.001"))
    assert lanes.read_text() != before
    command = [sys.executable, "-m", "pipeline", "verify", "--params", str(finished.params), str(finished.run_folder), "--steps", "3"]
    done = subprocess.run(command, cwd=clone, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "diverged at step 1: train/loss: 0x1." in done.stdout
    assert "changed since: parallel.lanes\n" in done.stdout


def test_ctrl_c_ends_it_and_leaves_nothing(copy: Copy) -> None:
    experiment = copy()
    process = experiment.start("verify", str(experiment.folder / "models"), "--world-size", "1")
    until((experiment.run_folder / "verify" / "journal.jsonl").exists, process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert said.endswith("receipt.json: stopped before the end, and so not compared, on 1 rank\n")
    assert not (experiment.run_folder / "verify").exists()
