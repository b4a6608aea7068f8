"""What counts as progress in talking to object storage."""

from collections.abc import Callable, Iterator

import pytest

from pipeline.config import MachineError
from pipeline.runs import object_storage
from pipeline.runs.object_storage import Place, one_line
from tests.kit.servers import Proxy
from tests.kit.storage import BUCKET, Storage


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Before a bucket, for this process too."""
    storage = Storage()
    proxy = Proxy(storage.uri)
    for name, value in storage.variables(proxy.uri).items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.close()
    storage.kill()


def test_every_answer_is_progress_and_a_timeout_is_none(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "READ_SECONDS", 2)
    taken: list[int] = []
    place = Place(BUCKET, "copies", "f" * 32, taken.append)
    listed = place.replace_list("first", 10, {"journal.jsonl": place.upload("a" * 64, b"lines")}, None)
    asked: list[Callable[[], object]] = [
        place.read_list,
        lambda: place.upload("b" * 64, b"content"),
        lambda: place.replace_list("first", 20, listed.files, listed),
        lambda: place.remove_unlisted(listed),
        lambda: place.remove(listed.files["journal.jsonl"]),
    ]
    for ask in asked:
        before = len(taken)
        ask()
        assert len(taken) > before
    taken.clear()
    proxy.mode = "500"
    with pytest.raises(MachineError, match="500"), one_line("cannot be read"):
        place.read_list()
    # botocore asks twice.
    assert taken == [0, 0]
    proxy.mode = "hole"
    with pytest.raises(MachineError, match="Read timeout"), one_line("cannot be read"):
        place.read_list()
    assert taken == [0, 0]
