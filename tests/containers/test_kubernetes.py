"""The files of deploy/kubernetes: their pods as containers, with Trainer's variables and the Job controller's rules; and their schemas."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.kit.experiment import LONGER, Experiment
from tests.kit.kubernetes import USER, Cluster, Job, documents
from tests.kit.schemas import schema

# Of the long experiment, on as many machines as there are.
AUTO = LONGER | {"dist__world_size": "auto", "dist__batch_size_per_gpu": None, "dist__global_batch": 96}


@pytest.fixture
def cluster(image: str, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)

    def make(objects: dict[str, dict[str, Any]], **changes: Any) -> Cluster:
        params, volume = Experiment(tmp_path).set(**AUTO | changes).params, tmp_path / "volume"
        volume.mkdir()
        # As fsGroup does it.
        os.chown(volume, 0, USER)
        volume.chmod(0o2775)
        made.append(Cluster(Job(objects), image, volume, params))
        return made[-1]

    yield make
    for one in made:
        one.remove()


def steps(one: Cluster) -> int:
    return sum(path.read_text().count("train/loss") for path in (one._volume / "runs").glob("*/journal.jsonl"))


def digest(one: Cluster) -> str:
    return json.loads((one._volume / "models" / "receipt.json").read_text())["weights_sha256"]


def weights(baseline: Experiment) -> str:
    return baseline.json("models/receipt.json")["weights_sha256"]


@pytest.mark.docker
def test_pods_of_a_trainjob_are_killed_and_drained_and_end_in_the_bits_of_one_machine(
    cluster: Callable[..., Cluster], baseline: Experiment
) -> None:
    one = cluster(documents("trainjob.yaml"))
    one.until(lambda: steps(one) > 10)
    one.kill(1)
    one.until(lambda: one.ended)
    assert one.ended == [(1, 137, "Count")]
    before = steps(one)
    one.until(lambda: steps(one) > before + 5)
    one.drain()
    one.until(lambda: len(one.ended) == 3)
    assert sorted(one.ended[1:]) == [(0, 75, "Ignore"), (1, 75, "Ignore")], one.logs()
    one.until(lambda: one.outcome)
    assert (one.outcome, one.failures[0], one.failures[1]) == ("Complete", 0, 1), one.logs()
    # The same name, another address.
    assert len(one.addresses[1]) == 3
    assert digest(one) == weights(baseline)
    # Nothing of root's.
    assert {path.stat().st_uid for path in one._volume.rglob("*") if path.name != "params.yaml"} == {USER}


@pytest.mark.docker
def test_a_jobset_whose_leader_is_killed_begins_again_to_the_same_bits(cluster: Callable[..., Cluster], baseline: Experiment) -> None:
    one = cluster(documents("jobset.yaml"))
    one.until(lambda: steps(one) > 10)
    one.kill(0)
    one.until(lambda: one.outcome)
    assert one.outcome == "Complete", one.logs()
    assert {(index, code, action) for index, code, action in one.ended if code} == {(0, 137, "Count"), (1, 6, "Count")}
    assert digest(one) == weights(baseline)


@pytest.mark.docker
def test_a_wrong_setting_fails_the_job_at_once(cluster: Callable[..., Cluster]) -> None:
    one = cluster(documents("jobset.yaml"), dist__lanes=1)
    one.until(lambda: one.outcome, seconds=60)
    assert (one.outcome, one.ended[0][1:]) == ("Failed", (2, "FailJob")), one.logs()


def job_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The Job that is made of a JobSet's template."""
    template = copy.deepcopy(objects["JobSet"]["spec"]["replicatedJobs"][0]["template"])
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "lockstep-node-0"}} | template


OBJECTS = documents("trainjob.yaml") | documents("jobset.yaml") | documents("storage.yaml")
CHECKED = {kind: OBJECTS[kind] for kind in ("TrainJob", "TrainingRuntime", "JobSet")} | {"Job": job_of(OBJECTS)}
# A key of each kind, and the typo for it.
TYPOS = {
    "TrainJob": ("numProcPerNode", "numProcsPerNode"),
    "TrainingRuntime": ("terminationGracePeriodSeconds", "terminationGracePeriodSecond"),
    "JobSet": ("publishNotReadyAddresses", "publishNotReadyAdresses"),
    "Job": ("podFailurePolicy", "podFailurePolicies"),
}


@pytest.mark.parametrize("kind", CHECKED)
def test_every_key_is_one_of_its_kind_and_a_typo_is_refused(kind: str) -> None:
    """By the schemas of the CRDs, made strict. They check neither CEL rules, webhooks nor controllers, nor labels and other metadata."""
    jsonschema.validate(CHECKED[kind], schema(kind))
    right, wrong = TYPOS[kind]
    spelled = json.loads(json.dumps(CHECKED[kind]).replace(f'"{right}"', f'"{wrong}"'))
    assert spelled != CHECKED[kind]
    with pytest.raises(jsonschema.ValidationError, match=wrong):
        jsonschema.validate(spelled, schema(kind))


def test_both_files_describe_the_same_pods() -> None:
    trained, bare = Job(documents("trainjob.yaml")), Job(documents("jobset.yaml"))
    assert (trained.env, trained.size) == (bare.env, bare.size)
    assert {name: value for name, value in bare.container.items() if name not in ("env", "resources")} == trained.container
    rest = {"parallelism", "completions", "completionMode"}
    assert {name: value for name, value in bare.spec.items() if name not in {*rest, "template"}} == {
        name: value for name, value in trained.spec.items() if name != "template"
    }
    assert documents("storage.yaml")["PersistentVolumeClaim"]["metadata"]["name"] == "lockstep"
