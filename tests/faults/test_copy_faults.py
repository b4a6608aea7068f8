"""A copy of runs in object storage: what a machine with its disk takes along is there, and storage that fails costs nothing."""

import contextlib
import json
import re
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
    (name,) = (name for name in storage.names() if name.endswith("/list.json"))
    return json.loads(storage.client.get_object(Bucket=BUCKET, Key=name)["Body"].read())


def copied_step(storage: Storage) -> int:
    return listed(storage)["step"] if any(name.endswith("/list.json") for name in storage.names()) else 0


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
    assert f"fetched {other.run_folder} from s3://runs/copies/{other.run_folder.name}/, at step " in said
    assert "going on from" in said
    same_figures(other, baseline)
    steps = [name for name in listed(storage)["files"] if name.startswith("checkpoints/step-")]
    assert steps == [f"checkpoints/step-{status(other)['step']:08}.safetensors"]
    assert set(listed(storage)["files"].values()) <= {name.removeprefix(f"copies/{other.run_folder.name}/") for name in storage.names()}
    assert listed(storage)["step"] == status(other)["step"]
    # And a third one has nothing to train, also after it has evaluated the model.
    third = elsewhere(experiment, "third")
    shutil.copytree(other.folder / "models", third.folder / "models")
    assert "fetched" in third.run("evaluate", **storage.variables())
    said = third.run("train", **storage.variables())
    assert "finished already, published again" in said
    assert weights(third) == weights(baseline)
    record_property("happened", "fetched, went on, bit-equal; a third machine published it")


@pytest.mark.fault(36, "SIGKILL of the process that copies, in the middle of a checkpoint")
def test_a_copy_whose_sending_is_cut_off_is_the_one_before(baseline: Experiment, experiment: Experiment, storage: Storage) -> None:
    experiment.set(**LONGER).run("prepare")
    experiment.run("train", "--stop-after-epochs", "1", expect=75, **storage.variables())
    step = listed(storage)["step"]
    # Half a megabyte takes four seconds: of the next checkpoint a part is there when the process is killed.
    proxy = Proxy(storage.uri, bytes_per_second=1 << 17)
    process = experiment.start("train", "--stop-after-epochs", "2", **storage.variables(proxy.uri))
    until(lambda: proxy.taken_bytes > 1 << 17, process)
    before = listed(storage)
    (copier,) = (one for one in psutil.Process(process.pid).children() if "pipeline.runs.copy_process" in one.cmdline())
    copier.kill()
    said, _ = process.communicate(timeout=120)
    proxy.close()
    assert process.returncode == 75, said
    assert "the copy does not have all of it yet" in said
    assert listed(storage) == before and before["step"] == step
    other = elsewhere(experiment, "other")
    said = other.run("train", **storage.variables())
    assert f"/, at step {step}\n" in said
    same_figures(other, baseline)
    assert set(listed(storage)["files"].values()) < {name.removeprefix(f"copies/{other.run_folder.name}/") for name in storage.names()}


@pytest.mark.fault(34, "object storage that answers 500, not at all, or a second late, for a whole start")
def test_storage_that_fails_costs_a_training_nothing_but_a_line(
    baseline: Experiment, experiment: Experiment, storage: Storage, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    proxy = Proxy(storage.uri)
    variables = storage.variables(proxy.uri)
    proxy.mode = "500"
    refused = experiment.run("train", expect=4, **variables)
    waited, refusal = refused.splitlines()
    assert waited.endswith("; it is asked again for 30 s")
    assert re.match("s3://runs/copies: cannot be read for [0-9a-f]+; unset LOCKSTEP_COPY to begin without it: ", refusal)
    # From here on the run is here, and nobody asks.
    stopped = experiment.run("train", "--stop-after-epochs", "1", expect=75)
    proxy.mode = "hole"
    stopped = experiment.run("train", "--stop-after-epochs", "2", expect=75, **variables)
    assert "the copy does not have all of it yet (the rest took too long; see " in stopped
    proxy.mode = "500"
    done = experiment.run("train", **variables)
    assert done.count("the training goes on without a copy for now: s3://runs/copies: upload failed: ") == 1
    assert "the copy does not have all of it yet (s3://runs/copies: upload failed: " in done
    assert "To send the rest: python -m pipeline sync --params" in done
    same_figures(experiment, baseline)
    proxy.mode, proxy.slow_seconds = "slow", 1.0
    assert "the copy has all of it" in experiment.run("sync", **variables)
    proxy.close()
    assert copied_step(storage) == status(experiment)["step"]
    record_property("happened", "75 and 0, a line each; sync completes the copy once storage takes it")


def test_a_copy_of_another_run_is_left_alone(experiment: Experiment, storage: Storage) -> None:
    experiment.run("prepare")
    experiment.run("train", **storage.variables())
    before = listed(storage)
    other = elsewhere(experiment, "other")
    other.run("train", "--stop-after-epochs", "1", expect=75)
    said = other.run("train", **storage.variables())
    assert "is the copy of another run of this experiment" in said
    assert listed(storage) == before


def test_keys_in_the_address_are_not_repeated(experiment: Experiment) -> None:
    said = experiment.run("train", expect=2, LOCKSTEP_COPY="s3://KEY:SECRET@bucket/prefix")
    assert said == "LOCKSTEP_COPY: write s3://BUCKET/PREFIX; keys belong in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY\n"


@pytest.mark.parametrize("address", ["s3:/bucket", "bucket", "gs://bucket", "s3://"])
def test_what_is_no_bucket_is_one_line(address: str, experiment: Experiment) -> None:
    said = experiment.run("train", expect=2, LOCKSTEP_COPY=address)
    assert said == f"LOCKSTEP_COPY: '{address}' is not the address of a bucket; write s3://BUCKET/PREFIX\n"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"files": {}}', b'{"run": "", "step": 1, "files": {"journal.jsonl": "files/0/0", "../x": "files/0/0"}}']
)
def test_a_list_that_is_none_of_ours_is_one_line(experiment: Experiment, storage: Storage, content: bytes) -> None:
    experiment.run("prepare")
    experiment.run("train", "--stop-after-epochs", "1", expect=75)
    run = experiment.run_folder.name
    shutil.rmtree(experiment.folder / "runs")
    storage.client.put_object(Bucket=BUCKET, Key=f"copies/{run}/list.json", Body=content)
    said = experiment.run("train", expect=4, **storage.variables())
    assert said == f"s3://runs/copies/{run}/list.json is missing or not what was sent; remove the copy, or unset LOCKSTEP_COPY\n"


def test_a_damaged_object_is_refused_and_nothing_of_it_is_left(experiment: Experiment, storage: Storage, tmp_path: Path) -> None:
    experiment.run("prepare")
    experiment.run("train", **storage.variables())
    name, place = next((name, place) for name, place in listed(storage)["files"].items() if name.startswith("checkpoints/step"))
    (damaged,) = (one for one in storage.names() if one.endswith(place))
    storage.client.put_object(Bucket=BUCKET, Key=damaged, Body=b"other")
    other = elsewhere(experiment, "other")
    said = other.run("train", expect=4, **storage.variables())
    assert f"{name} is missing or not what was sent; remove the copy, or unset LOCKSTEP_COPY" in said
    assert not list(other.folder.glob("runs/*/journal.jsonl")) and not list(other.folder.glob("runs/*/checkpoints"))
