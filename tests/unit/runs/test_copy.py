"""A run's copy in object storage: what two senders do to each other, what is cut off, and what cannot be fetched."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from pipeline.config import MachineError
from pipeline.files import write_checksummed_json
from pipeline.runs import copy, object_storage
from pipeline.runs.copy import Copy
from pipeline.runs.object_storage import Listed, Place, Refused
from pipeline.tracking.journal import Journal
from tests.kit.storage import BUCKET, Storage

RUN = "f" * 32
ADDRESS = f"s3://{BUCKET}/copies/{RUN}/"


@pytest.fixture(scope="module")
def server() -> Iterator[Storage]:
    one = Storage()
    yield one
    one.kill()


@pytest.fixture
def storage(server: Storage, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """An empty bucket, for this process too."""
    for name in server.names():
        server.client.delete_object(Bucket=BUCKET, Key=name)
    for name, value in server.variables().items():
        monkeypatch.setenv(name, value)
    return server


class Run:
    """A run's folder on one machine, with as many checkpoints as are made of it."""

    def __init__(self, folder: Path, start: str = "first"):
        self.folder = folder / RUN
        (self.folder / "checkpoints").mkdir(parents=True)
        journal = Journal(self.folder / "journal.jsonl")
        journal.event("run", id=start, experiment="", name="", params={}, tags={})
        journal.close()
        (self.folder / "params.yaml").write_text("seed: 1\n")
        self.kept: list[dict[str, Any]] = []
        self.copy = Copy(self.folder, BUCKET, "copies")

    def reach(self, step: int, content: bytes | None = None) -> "Run":
        """Write a checkpoint as a training does, which keeps two."""
        path = self.folder / "checkpoints" / f"step-{step:08}.safetensors"
        path.write_bytes(content or b"weights of step %d" % step)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        self.kept.append({"file": path.name, "sha256": sha256, "step": step})
        for old in self.kept[:-2]:
            (path.parent / old["file"]).unlink()
        self.kept = self.kept[-2:]
        write_checksummed_json(path.parent / "index.json", {"checkpoints": self.kept})
        return self


def listed(storage: Storage) -> Listed:
    """The list, all of whose objects are there."""
    found = Place(BUCKET, "copies", RUN).read_list()
    assert found is not None
    assert {f"copies/{RUN}/{name}" for name in found.files.values()} <= storage.names()
    return found


def fetched(folder: Path) -> Path:
    Copy(folder / RUN, BUCKET, "copies").fetch()
    return folder / RUN


def test_what_was_sent_is_fetched_and_what_is_gone_from_the_run_is_removed(storage: Storage, tmp_path: Path) -> None:
    run = Run(tmp_path / "a").reach(10)
    run.copy.send()
    first = listed(storage)
    run.reach(20).copy.send()
    assert listed(storage).step == 20
    assert storage.names() == {f"copies/{RUN}/{name}" for name in [*listed(storage).files.values(), "list.json"]}
    assert first.files["params.yaml"] == listed(storage).files["params.yaml"]
    there = fetched(tmp_path / "b")
    assert sorted(path.name for path in (there / "checkpoints").iterdir()) == ["index.json", "step-00000020.safetensors"]
    assert (there / "checkpoints" / "step-00000020.safetensors").read_bytes() == b"weights of step 20"
    assert (there / "journal.jsonl").read_bytes() == (run.folder / "journal.jsonl").read_bytes()


def test_an_older_run_does_not_replace_a_copy_that_is_further(storage: Storage, tmp_path: Path) -> None:
    older, further = Run(tmp_path / "a").reach(400), Run(tmp_path / "b").reach(900)
    further.copy.send()
    with pytest.raises(MachineError, match=f"{ADDRESS} is at step 900, this run at 400: it stays until this run has come so far"):
        older.copy.send(ending=True)
    assert listed(storage).step == 900
    older.reach(1000).copy.send()
    assert listed(storage).step == 1000


def test_of_two_machines_that_go_on_with_a_run_the_later_one_sends_its_copy(storage: Storage, tmp_path: Path) -> None:
    before = Run(tmp_path / "a").reach(10)
    before.copy.send()
    after = Run(tmp_path / "b").reach(10).reach(20)
    after.copy.send()
    # The first one lives still, and has the same bits at the same steps.
    before.reach(20).reach(30)
    with pytest.raises(Refused, match="another start of this run sends its copy now"):
        before.copy.send()
    assert listed(storage).step == 20
    after.reach(30).copy.send()
    assert listed(storage).step == 30


def test_of_two_runs_that_begin_at_once_one_has_a_copy(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Run(tmp_path / "a", "one").reach(10), Run(tmp_path / "b", "other").reach(10)
    read = Place.read_list

    def overtaken(place: Place) -> Listed | None:
        found = read(place)
        monkeypatch.setattr(Place, "read_list", read)
        other.copy.send()
        return found

    monkeypatch.setattr(Place, "read_list", overtaken)
    with pytest.raises(MachineError, match="was replaced meanwhile, and is read again"):
        one.copy.send()
    other.reach(20).copy.send()
    with pytest.raises(Refused, match=f"{ADDRESS} is the copy of another run of this experiment, at step 20; remove it"):
        one.copy.send()
    assert listed(storage).run == "other"


def test_a_checkpoint_that_is_removed_while_it_is_sent_is_sent(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "a").reach(10)
    upload = Place.upload

    def slow(place: Place, sha256: str, content: Any) -> str:
        monkeypatch.setattr(Place, "upload", upload)
        run.reach(20).reach(30)
        return upload(place, sha256, content)

    monkeypatch.setattr(Place, "upload", slow)
    run.copy.send()
    assert listed(storage).step == 10
    there = fetched(tmp_path / "b")
    assert (there / "checkpoints" / "step-00000010.safetensors").read_bytes() == b"weights of step 10"


def test_what_was_never_listed_is_removed_by_the_next_start(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "UNLISTED_HOURS", 0.0)
    run = Run(tmp_path / "a").reach(10)
    key = f"copies/{RUN}/files/{'0' * 32}/{'1' * 64}"
    storage.client.put_object(Bucket=BUCKET, Key=key, Body=b"never listed")
    upload = storage.client.create_multipart_upload(Bucket=BUCKET, Key=key)
    storage.client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload["UploadId"], PartNumber=1, Body=b"part")
    run.copy.send()
    assert key not in storage.names()
    assert not storage.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    assert listed(storage).step == 10


def test_no_process_removes_what_another_has_uploaded(storage: Storage) -> None:
    one, other = Place(BUCKET, "copies", RUN), Place(BUCKET, "copies", RUN)
    names = [place.upload("0" * 64, b"the same") for place in (one, other)]
    one.remove(names[0])
    assert storage.names() == {f"copies/{RUN}/{names[1]}"}


def test_a_store_without_conditional_requests_is_asked_before(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = Run(tmp_path / "a").reach(10), Run(tmp_path / "b").reach(10).reach(20)
    for run in (before, after):
        refuse_conditions(run.copy, monkeypatch)
    before.copy.send()
    after.copy.send()
    with pytest.raises(Refused, match="another start of this run sends its copy now"):
        before.reach(20).reach(30).copy.send()
    assert listed(storage).step == 20


def refuse_conditions(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of such a store, which moto gives to nothing."""
    client = copy._place._client
    put = client.put_object

    def answer(**request: Any) -> Any:
        if {"IfMatch", "IfNoneMatch"} & set(request):
            raise ClientError({"Error": {"Code": "NotImplemented", "Message": "a header is not implemented"}}, "PutObject")
        return put(**request)

    monkeypatch.setattr(client, "put_object", answer)


def test_a_checkpoint_of_several_parts_comes_back_whole(storage: Storage, tmp_path: Path) -> None:
    content = bytes(range(256)) * (20 << 12)
    Run(tmp_path / "a").reach(10, content).copy.send()
    place = listed(storage).files["checkpoints/step-00000010.safetensors"]
    # An object that was sent in parts has their number in its version.
    assert storage.client.head_object(Bucket=BUCKET, Key=f"copies/{RUN}/{place}")["ETag"].endswith('-3"')
    assert (fetched(tmp_path / "b") / "checkpoints" / "step-00000010.safetensors").read_bytes() == content


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("name", ["params.yaml", "checkpoints/step-00000010.safetensors", "journal.jsonl"])
def test_what_is_not_what_was_sent_leaves_a_run_that_has_not_begun(storage: Storage, tmp_path: Path, name: str, gone: bool) -> None:
    Run(tmp_path / "a").reach(10).copy.send()
    key = f"copies/{RUN}/{listed(storage).files[name]}"
    storage.client.delete_object(Bucket=BUCKET, Key=key)
    if not gone:
        storage.client.put_object(Bucket=BUCKET, Key=key, Body=b"other")
    with pytest.raises(Refused, match=f"{ADDRESS}{name} is missing or not what was sent; remove the copy, or unset LOCKSTEP_COPY"):
        fetched(tmp_path / "b")
    assert not (tmp_path / "b" / RUN / "journal.jsonl").exists()
    assert name == "journal.jsonl" or not (tmp_path / "b" / RUN / "checkpoints").exists()


def test_a_copy_that_is_replaced_while_it_is_fetched_is_fetched_anew(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "a").reach(10)
    run.copy.send()
    download = Place.download

    def replaced(place: Place, name: str, path: Path) -> None:
        monkeypatch.setattr(Place, "download", download)
        run.reach(20).copy.send()
        download(place, name, path)

    monkeypatch.setattr(Place, "download", replaced)
    there = fetched(tmp_path / "b")
    assert json.loads((there / "checkpoints" / "index.json").read_bytes())["checkpoints"][0]["step"] == 20


def test_a_copy_is_incomplete_until_an_end_has_been_sent(storage: Storage, tmp_path: Path) -> None:
    assert not copy.is_incomplete(tmp_path)
    copy.write_state(tmp_path, "s3://runs/copies: upload failed")
    assert copy.is_incomplete(tmp_path)
    copy.write_state(tmp_path, None, complete=True)
    assert not copy.is_incomplete(tmp_path)
