"""Checkpoints in MLflow: as soon as they are saved, those that the run keeps, and in the end however long they take."""

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import mlflow
import pytest

from pipeline.files import Paths
from pipeline.tracking.journal import CHECKPOINT, Journal
from pipeline.tracking.mirror_process import MirrorProcess, needs_sync
from tests.kit.experiment import LONGER, Experiment
from tests.kit.mlflow_contents import artifacts
from tests.kit.servers import Proxy, Server
from tests.kit.trainings import mlflow_runs, status, suspended, wait_for_step
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("server")).start()
    yield one
    one.kill()


def kept(run: Path) -> dict[str, str]:
    """The SHA-256 of the checkpoints that a run keeps."""
    return {f"checkpoints/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in run.glob("checkpoints/*.safetensors")}


def in_mlflow(uri: str, experiment: str) -> dict[str, str]:
    """The SHA-256 of the checkpoints that MLflow has of an experiment's only run."""
    client = mlflow.MlflowClient(uri)
    runs = [run for one in client.search_experiments() if one.name == experiment for run in client.search_runs([one.experiment_id])]
    assert len(runs) < 2
    found = {name: sha256 for run in runs for name, sha256 in artifacts(uri, run).items()}
    return {name: sha256 for name, sha256 in found.items() if name.startswith("checkpoints/")}


def is_between_checkpoints(experiment: Experiment) -> bool:
    """Return True if the newest checkpoint has been told of, and the next one is ten steps away."""
    saved, figures = experiment.journal(CHECKPOINT), experiment.journal("metrics")
    return bool(saved) and 2 <= figures[-1]["step"] - saved[-1]["step"] <= LONGER["checkpoint__every_steps"] // 2


def mirrored(uri: str, experiment: Experiment) -> bool:
    """Return True if MLflow has what the run keeps; what the mirror removes meanwhile cannot be read."""
    try:
        return in_mlflow(uri, "lockstep") == kept(experiment.run_folder)
    except mlflow.MlflowException:
        return False


@pytest.mark.parametrize("ending", ["stopped", "failed"])
def test_checkpoints_are_in_mlflow_while_it_trains_and_also_when_it_does_not_finish(experiment: Experiment, ending: str) -> None:
    experiment.set(**LONGER).run("prepare")
    uri = f"sqlite:///{experiment.folder / 'mlflow.db'}"
    process = experiment.start("train")
    wait_for_step(experiment, 70, process)
    # Not while one is being written, which the journal has not told of yet.
    until(lambda: is_between_checkpoints(experiment), process)
    with suspended(process) as ranks:
        until(lambda: mirrored(uri, experiment), process, every_seconds=0.3)
        assert any(name.startswith("checkpoints/step-") for name in kept(experiment.run_folder))
        if ending == "failed":
            # No checkpoint is left to go on from.
            for path in experiment.run_folder.glob("checkpoints/step-*"):
                path.write_bytes(b"damaged")
            for one in ranks:
                one.kill()
        else:
            process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == (75 if ending == "stopped" else 4), said
    assert status(experiment)["outcome"] == ("stopped" if ending == "stopped" else "machine")
    (run,) = mlflow_runs(experiment)
    assert run.info.status == ("KILLED" if ending == "stopped" else "FAILED")
    if ending == "stopped":
        assert in_mlflow(uri, "lockstep") == kept(experiment.run_folder)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A stopped run whose one checkpoint is large."""
    folder = tmp_path / "runs" / "0123456789abcdef"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000020.safetensors").write_bytes(os.urandom(24 * MEGABYTE))
    journal = Journal(folder / "journal.jsonl")
    journal.event("run", id=tmp_path.name, experiment=tmp_path.name, name="a run", params={}, tags={})
    journal.event("started", stage="train", tags={})
    journal.metrics({"train/loss": 1.0}, 20)
    journal.event(CHECKPOINT, step=20)
    journal.event("ended", stage="train", outcome="stopped", cause="")
    journal.close()
    return folder


@pytest.mark.fault(38, "24 MB to a real server over a link of 0.7 MB/s, which answers 5 s after it has them: over half a minute")
def test_an_upload_that_advances_is_waited_for(
    run: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Note
) -> None:
    proxy = Proxy(server.uri, bytes_per_second=0.7 * MEGABYTE, late_seconds=5)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
    announced: list[str] = []
    paths, started_at = Paths(tmp_path / "params.yaml"), time.monotonic()
    error = MirrorProcess(run, paths).finish(Event(), announced.append)
    took_seconds = time.monotonic() - started_at
    proxy.close()
    assert error is None
    # Three times as long as a server that answers nothing is waited for.
    assert took_seconds > 30
    assert announced == ["MLflow is still receiving; waiting for it, for 600 s at most"]
    assert in_mlflow(server.uri, tmp_path.name) == kept(run)
    assert not needs_sync(run, paths)
    record_property("happened", f"sent in {took_seconds:.0f} s; said once that it waits; the same SHA-256")


@pytest.mark.fault(17, "black-holed in the middle of the upload of a large file")
@pytest.mark.fault(38, "an upload that is cut off in its middle, then sync")
def test_an_upload_that_stalls_is_given_up_in_ten_seconds_and_sync_sends_it(
    run: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Note
) -> None:
    proxy = Proxy(server.uri, bytes_per_second=2 * MEGABYTE)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
    paths = Paths(tmp_path / "params.yaml")
    mirror = MirrorProcess(run, paths)
    until(lambda: proxy.taken_bytes > 6 * MEGABYTE)
    proxy.mode, stalled_at = "hole", time.monotonic()
    error = mirror.finish(Event(), print)
    late_seconds = time.monotonic() - stalled_at
    assert error is not None and "not answered" in error
    # What the kernel holds for either side is still sent.
    assert late_seconds < 14
    proxy.mode, proxy.bytes_per_second = "pass", 1e9
    assert MirrorProcess(run, paths, patient=True).wait() is None
    proxy.close()
    assert in_mlflow(server.uri, tmp_path.name) == kept(run)
    record_property("happened", f"given up {late_seconds:.1f} s after the last byte; sync sends it; the same SHA-256")


@pytest.mark.fault(35, "a stop request while a checkpoint goes to MLflow over a slow link")
def test_after_a_stop_request_an_upload_is_not_waited_for(
    run: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Note
) -> None:
    proxy = Proxy(server.uri, bytes_per_second=0.7 * MEGABYTE)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
    mirror = MirrorProcess(run, Paths(tmp_path / "params.yaml"))
    until(lambda: proxy.taken_bytes > 2 * MEGABYTE)
    started_at = time.monotonic()
    error = mirror.finish(Event(), print, stopped=True)
    late_seconds = time.monotonic() - started_at
    proxy.close()
    assert error is not None
    assert late_seconds < 12
    record_property("happened", f"{late_seconds:.1f} s late; the rest is left to sync")


def test_a_checkpoint_that_is_no_longer_kept_leaves_mlflow_and_one_that_was_never_sent_is_not_missed(
    run: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    paths = Paths(tmp_path / "params.yaml")
    folder = run / "checkpoints"
    (folder / "step-00000020.safetensors").write_bytes(b"twenty")
    assert MirrorProcess(run, paths).finish(Event(), print) is None
    journal = Journal(run / "journal.jsonl")
    for step in (40, 60, 80):
        (folder / f"step-{step:08d}.safetensors").write_bytes(b"later")
        journal.event(CHECKPOINT, step=step)
    for step in (20, 40):
        (folder / f"step-{step:08d}.safetensors").unlink()
    journal.event("ended", stage="train", outcome="stopped", cause="")
    journal.close()
    assert MirrorProcess(run, paths).finish(Event(), print) is None
    assert in_mlflow(server.uri, tmp_path.name) == kept(run)
    assert sorted(kept(run)) == ["checkpoints/step-00000060.safetensors", "checkpoints/step-00000080.safetensors"]
