"""A copy of runs in object storage: what a machine with its disk takes along is there, and storage that fails costs nothing."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.kit.experiment import LONGER, Experiment
from tests.kit.servers import Proxy
from tests.kit.storage import BUCKET, Storage
from tests.kit.trainings import same_figures, status, weights
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]


@pytest.fixture
def storage() -> Iterator[Storage]:
    one = Storage()
    yield one
    one.kill()


def elsewhere(experiment: Experiment, name: str) -> Experiment:
    """The same experiment on another machine, with nothing but its params file and MLflow's store."""
    folder = experiment.folder / name
    folder.mkdir()
    other = Experiment(folder).with_database()
    shutil.copy(experiment.params, other.params)
    other.run("prepare")
    return other


def listed(storage: Storage) -> dict:
    """The list of the only copy."""
    (name,) = (name for name in storage.names() if name.endswith("/copy.json"))
    return json.loads(storage.client.get_object(Bucket=BUCKET, Key=name)["Body"].read())


def copied_step(storage: Storage) -> int:
    return listed(storage)["step"] if any(name.endswith("/copy.json") for name in storage.names()) else 0


def kill_all(process: "subprocess.Popen[str]") -> None:
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.communicate()


@pytest.mark.fault(36, "a machine lost with its whole disk; another one goes on from the copy in object storage")
def test_a_run_that_is_lost_with_its_disk_goes_on_elsewhere_from_its_copy(
    baseline: Experiment, experiment: Experiment, storage: Storage, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train", **storage.variables())
    until(lambda: copied_step(storage) >= 40, process)
    kill_all(process)
    shutil.rmtree(experiment.folder / "runs")
    other = elsewhere(experiment, "other")
    said = other.run("train", **storage.variables())
    assert f"fetched {other.run_folder} from s3://runs/copies, at step " in said
    assert "going on from" in said
    same_figures(other, baseline)
    # What the run no longer keeps is no longer there.
    files = {sha256 for sha256, _ in listed(storage)["files"].values()}
    assert {name.rpartition("/")[2] for name in storage.names()} == files | {"copy.json"}
    assert listed(storage)["step"] == status(other)["step"]
    # And a third one has nothing to train.
    third = elsewhere(experiment, "third")
    said = third.run("train", **storage.variables())
    assert "finished already, published again" in said
    assert weights(third) == weights(baseline)
    record_property("happened", "fetched, went on, bit-equal; a third machine published it")


@pytest.mark.fault(35, "SIGKILL of the process that copies, again and again, in the middle of sending")
def test_whenever_sending_ends_the_copy_is_one_to_go_on_from(baseline: Experiment, experiment: Experiment, storage: Storage) -> None:
    experiment.set(**LONGER | {"checkpoint__every_steps": 10}).run("prepare")
    seen: set[int] = set()
    # A stop behind an epoch ends it, so that each start has a process of its own to lose.
    for epoch in (1, 2):
        process = experiment.start("train", "--stop-after-epochs", str(epoch), **storage.variables())
        before = copied_step(storage)
        until(lambda before=before: copied_step(storage) > before, process)
        copier = [one for one in psutil.Process(process.pid).children() if "pipeline.runs.copy_process" in one.cmdline()]
        # Wherever it is just then.
        copier[0].kill()
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 75, said
        assert "the copy does not have all of it yet" in said
        seen.add(copied_step(storage))
    assert len(seen) == 2
    other = elsewhere(experiment, "other")
    other.run("train", **storage.variables())
    same_figures(other, baseline)


@pytest.mark.fault(34, "object storage that answers 500, 3 s late, or not at all, for a whole training")
def test_storage_that_fails_costs_a_training_nothing_but_a_line(
    baseline: Experiment, experiment: Experiment, storage: Storage, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    proxy = Proxy(storage.uri)
    variables = storage.variables(proxy.uri)
    proxy.mode = "500"
    refused = experiment.run("train", expect=4, **variables)
    assert len(refused.splitlines()) == 1
    assert "s3://runs/copies: cannot be asked for " in refused
    assert "; unset LOCKSTEP_COPY to begin without it: " in refused
    # From here on the run is here, and nobody asks.
    stopped = experiment.run("train", "--stop-after-epochs", "1", expect=75)
    for epoch, mode in ((2, "500"), (3, "hole")):
        proxy.mode = mode
        stopped = experiment.run("train", "--stop-after-epochs", str(epoch), expect=75, **variables)
        assert "the copy does not have all of it yet (s3://runs/copies: " in stopped or "copy.log" in stopped
    proxy.mode = "pass"
    experiment.run("train", **variables)
    proxy.close()
    same_figures(experiment, baseline)
    assert copied_step(storage) == status(experiment)["step"]
    record_property("happened", "75 and 0, a line each; the copy is complete once storage takes it")


def test_a_copy_of_another_start_is_left_alone(experiment: Experiment, storage: Storage) -> None:
    experiment.run("prepare")
    experiment.run("train", **storage.variables())
    before = listed(storage)
    other = elsewhere(experiment, "other")
    other.run("train", "--stop-after-epochs", "1", expect=75)
    said = other.run("train", **storage.variables())
    assert "is the copy of another start of this experiment" in said
    assert listed(storage) == before


@pytest.mark.parametrize("address", ["s3:/bucket", "bucket", "gs://bucket", "s3://"])
def test_what_is_no_bucket_is_one_line(address: str, experiment: Experiment) -> None:
    said = experiment.run("train", expect=2, LOCKSTEP_COPY=address)
    assert said == f"LOCKSTEP_COPY: '{address}' is not the address of a bucket; write s3://BUCKET/PREFIX\n"


def test_a_damaged_object_is_refused_and_nothing_of_it_is_left(experiment: Experiment, storage: Storage, tmp_path: Path) -> None:
    experiment.run("prepare")
    experiment.run("train", **storage.variables())
    name, (sha256, _) = next((name, facts) for name, facts in listed(storage)["files"].items() if name.startswith("checkpoints/step"))
    (damaged,) = (one for one in storage.names() if one.endswith(sha256))
    storage.client.put_object(Bucket=BUCKET, Key=damaged, Body=b"other")
    other = elsewhere(experiment, "other")
    said = other.run("train", expect=4, **storage.variables())
    assert f"{name} is damaged: it is not what was sent; unset LOCKSTEP_COPY" in said
    assert not list(other.folder.glob("runs/*/journal.jsonl")) and not list(other.folder.glob("runs/*/checkpoints"))
