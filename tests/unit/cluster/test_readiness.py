"""Where a worker's data come from: its checkout's where they are the leader's, else a place of its own."""

import shutil
import threading
from pathlib import Path

import pytest

from pipeline import prepare
from pipeline.cluster.messages import JobOffer
from pipeline.cluster.readiness import Readiness, bitwise_requirements
from pipeline.files import Paths
from pipeline.job import Job
from tests.kit.experiment import Experiment, make_job


@pytest.fixture(scope="module")
def leading(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A leader's job, with its data."""
    return make_job(tmp_path_factory.mktemp("leader"), data__name="synthetic:240", dist__nodes=2)


@pytest.fixture
def offer(leading: Job) -> JobOffer:
    values = {name: getattr(leading, name) for name in ("config", "device", "backend", "precision")}
    return JobOffer(id="1", stage="train", run="a-run", bitwise_requirements=bitwise_requirements(leading), **values)


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_a_worker_never_writes_what_its_own_checkout_has_prepared(tmp_path: Path, offer: JobOffer) -> None:
    own = make_job(tmp_path, data__name="synthetic:120").prepared
    before = content(own)
    job, refusal = Readiness(Paths(tmp_path / "params.yaml"), prepare.run).check(offer)
    assert refusal is None
    assert content(own) == before
    assert job.prepared.parent == tmp_path / "data" / "by-digest"
    assert bitwise_requirements(job)["data"] == offer.bitwise_requirements["data"]


def test_the_leaders_data_are_used_where_they_are(tmp_path: Path, leading: Job, offer: JobOffer) -> None:
    shutil.copytree(leading.prepared, tmp_path / "data" / "prepared")
    job, refusal = Readiness(Paths(tmp_path / "params.yaml"), prepare.run).check(offer)
    assert refusal is None
    assert job.prepared == tmp_path / "data" / "prepared"
    assert not (tmp_path / "data" / "by-digest").exists()


def test_two_workers_of_one_checkout_prepare_once_and_damage_is_repaired(tmp_path: Path, offer: JobOffer) -> None:
    Experiment(tmp_path).set()
    prepared: list[Path] = []

    def counted(*arguments) -> int:
        prepared.append(arguments[2])
        return prepare.run(*arguments)

    results: list[tuple[Job, str | None]] = []
    check = Readiness(Paths(tmp_path / "params.yaml"), counted).check
    threads = [threading.Thread(target=lambda: results.append(check(offer))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [refusal for _, refusal in results] == [None] * 4
    assert len({job.prepared for job, _ in results}) == 1
    assert len(prepared) == 1
    (array,) = prepared[0].glob("train-images.npy")
    array.write_bytes(array.read_bytes()[:-1])
    assert check(offer)[1] is None
    assert len(prepared) == 2
    assert check(offer)[1] is None
    assert len(prepared) == 2


def test_other_data_are_refused_by_name(tmp_path: Path, offer: JobOffer) -> None:
    other = offer.model_copy(update={"bitwise_requirements": offer.bitwise_requirements | {"data": "0" * 64}})
    _, refusal = Readiness(Paths(tmp_path / "params.yaml"), prepare.run).check(other)
    assert refusal is not None
    assert refusal.startswith("would compute other bits: data: ")
