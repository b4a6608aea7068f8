"""`dvc repro` and `make repro` as a person runs them: Ctrl-C in the terminal, a DVC that is killed, a result that is committed."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pipeline.tracking.journal import last
from tests.kit.checkout import clone_of, commit
from tests.kit.experiment import LONGER, ROOT, Experiment, clean_environment, settings, whole
from tests.kit.trainings import same_figures, status, suspended
from tests.kit.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Note = Callable[[str, object], None]


def prepared_clone(folder: Path) -> Experiment:
    """This tree as a clone with the long experiment, using the environment that the tests run in."""
    clone_of(folder)
    (folder / "params.yaml").write_text(whole(settings(**LONGER)))
    (folder / ".venv").symlink_to(ROOT / ".venv")
    # Older than the environment, so that make does not install it again; and never a part of the clone.
    os.utime(folder / "requirements-dev.lock", (0, 0))
    (folder / ".git/info/exclude").write_text(".venv\n")
    commit(folder, "the long experiment")
    return Experiment(folder)


def environment_of(folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in clean_environment().items() if not name.startswith("PYTHON")}
    return environment | {"PATH": f"{folder / '.venv' / 'bin'}:{environment['PATH']}"}


def start(clone: Experiment, *words: str) -> "subprocess.Popen[str]":
    """A command in a terminal's foreground: a process group of its own, which Ctrl-C reaches as a whole."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=clone.folder, env=environment_of(clone.folder), process_group=0, **pipes)


def wait_for_training(clone: Experiment, process: "subprocess.Popen[str]", step: int) -> psutil.Process:
    """The train command, once its training has reached a step."""

    def reached() -> bool:
        journals = list(clone.folder.glob("runs/*/journal.jsonl"))
        # The status is written after the journal begins, and before the first step.
        return bool(journals) and last(journals[0], "metrics").get("step", 0) >= step and status(clone)["outcome"] == "running"

    until(reached, process)
    return psutil.Process(int(status(clone)["process"].split()[0]))


@pytest.mark.fault(4, "SIGINT to the whole foreground group of `dvc repro`, and of `make repro`")
@pytest.mark.fault(27, "SIGKILL of DVC after train has ended and before dvc.lock names it")
def test_ctrl_c_under_dvc_and_under_make_is_resumable_and_a_killed_dvc_is_repaired(
    baseline: Experiment, tmp_path: Path, record_property: Note
) -> None:
    clone = prepared_clone(tmp_path / "clone")
    (clone.folder / "models").mkdir()
    (clone.folder / "models/of-an-earlier-training").touch()
    for words, step in ((("dvc", "repro"), 40), (("make", "repro"), 100)):
        process = start(clone, *words)
        wait_for_training(clone, process, step)
        children = psutil.Process(process.pid).children(recursive=True)
        with suspended(process):
            os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=120)
        assert process.returncode not in (0, 75), said
        assert not psutil.wait_procs(children, timeout=15)[1]
        assert (status(clone)["outcome"], status(clone)["exit_code"]) == ("stopped", 75), said
        assert step <= status(clone)["step"] < 224
        assert status(clone)["command"] == " ".join(words)
        assert not (clone.folder / "models").exists(), "DVC clears a stage's outputs before it runs"
    killed_between_train_and_its_lock(clone)
    done = start(clone, "dvc", "repro")
    said, _ = done.communicate(timeout=280)
    assert done.returncode == 0, said
    assert "finished already, published again" in said
    assert {"prepare", "train", "evaluate"} == yaml.safe_load((clone.folder / "dvc.lock").read_text())["stages"].keys()
    same_figures(clone, baseline)
    reproduced_from_what_is_committed(clone, tmp_path / "other")
    record_property("happened", "75 twice, nothing left running; without its lock the finished training is published again, bit-equal")


def killed_between_train_and_its_lock(clone: Experiment) -> None:
    """Go on under a DVC that is stopped while train ends, and killed before it can see that."""
    dvc = start(clone, "dvc", "repro")
    train = wait_for_training(clone, dvc, 150)
    os.kill(dvc.pid, signal.SIGSTOP)
    until(lambda: not train.is_running() or train.status() == psutil.STATUS_ZOMBIE)
    assert status(clone)["outcome"] == "done"
    dvc.kill()
    dvc.communicate()
    assert "train" not in yaml.safe_load((clone.folder / "dvc.lock").read_text())["stages"]


def reproduced_from_what_is_committed(clone: Experiment, folder: Path) -> None:
    """`dvc.lock` and `metrics/` are all that a fresh clone needs to come to the same figures, and to see that it did."""
    subprocess.run(["git", "add", "-f", "dvc.lock", "metrics"], cwd=clone.folder, check=True)
    commit(clone.folder, "the result")
    subprocess.run(["git", "clone", "-q", str(clone.folder), str(folder)], check=True)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    before = {path.name: path.read_bytes() for path in (folder / "metrics").iterdir()}
    assert before.keys() == {"train.json", "eval.json"}
    assert not (folder / "models").exists()
    assert not (folder / "runs").exists()
    other = start(Experiment(folder), "dvc", "repro")
    said, _ = other.communicate(timeout=280)
    assert other.returncode == 0, said
    assert "finished already" not in said
    changed = subprocess.run(["git", "diff", "--name-only"], cwd=folder, capture_output=True, text=True, check=True).stdout.split()
    assert "metrics/train.json" not in changed and "metrics/eval.json" not in changed
    assert {path.name: path.read_bytes() for path in (folder / "metrics").iterdir()} == before
    same_figures(Experiment(folder), clone)
    for key in ("steps", "weights_sha256"):
        assert json.loads((folder / "models/receipt.json").read_text())[key] == clone.json("models/receipt.json")[key]
    shutil.rmtree(folder)
