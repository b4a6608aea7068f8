"""Checkpoints that are written beside the training, by a thread."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pipeline.ranks import Ranks
from pipeline.runs.checkpoints import read_index
from pipeline.tracking.journal import Journal
from pipeline.training import checkpoint, shards
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.checkpoint_file import weights_sha256
from pipeline.training.state import State
from tests.unit.training.test_checkpoint import SingleNode, descend, parts


class SlowDisk:
    """Writes a file when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun: list[str] = []
        self._may = threading.Semaphore(0)
        write = checkpoint.atomic_write

        def slowly(path: Path, content: Any) -> None:
            self.begun.append(path.name)
            assert self._may.acquire(timeout=30)
            write(path, content)

        monkeypatch.setattr(checkpoint, "atomic_write", slowly)

    def write(self, files: int = 1) -> None:
        self._may.release(files)


@pytest.fixture
def executor() -> Iterator[Executor]:
    """Its thread ends with the test: a write left over would take part in the next test's faults."""
    with ThreadPoolExecutor(1) as one:
        yield one


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, executor: Executor) -> Iterator[SlowDisk]:
    one = SlowDisk(monkeypatch)
    yield one
    one.write(100)


def broken(path: Path, content: Any) -> None:
    raise OSError(28, "No space left on device", str(path))


def beside(folder: Path, executor: Executor, ranks: Any = None) -> Checkpoints:
    return Checkpoints(folder, 2, ranks or SingleNode(), executor=executor)


def test_training_goes_on_meanwhile_and_the_file_has_what_was_there_before(tmp_path: Path, disk: SlowDisk, executor: Executor) -> None:
    checkpoints, (model, optimizer) = beside(tmp_path, executor), parts()
    descend(model, optimizer, range(3))
    before = weights_sha256(model.state_dict())
    checkpoints.save(3, State(model, optimizer))
    descend(model, optimizer, range(3, 5))
    assert list(checkpoints.written()) == []
    assert not list(tmp_path.glob("step-*"))
    disk.write()
    checkpoints.finish()
    assert list(checkpoints.written()) == [3]
    assert list(checkpoints.written()) == []
    tensors = load_file(tmp_path / "step-00000003.safetensors")
    found = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    assert weights_sha256(found) == before != weights_sha256(model.state_dict())


def test_a_step_is_told_of_as_soon_as_it_is_written(tmp_path: Path, disk: SlowDisk, executor: Executor) -> None:
    checkpoints, (model, optimizer) = beside(tmp_path, executor), parts()
    checkpoints.save_best(State(model, optimizer), 1, 0.5)
    checkpoints.save(1, State(model, optimizer))
    disk.write(2)
    checkpoints._pending[-1].result(30)
    assert list(checkpoints.written()) == [1]


@pytest.mark.parametrize("best", [False, True])
def test_no_more_than_two_copies_wait_for_a_slow_disk(best: bool, tmp_path: Path, disk: SlowDisk, executor: Executor) -> None:
    checkpoints, (model, optimizer) = beside(tmp_path, executor), parts()
    checkpoints.save_best(State(model, optimizer), 1, 0.5)
    checkpoints.save(1, State(model, optimizer))
    again = (lambda: checkpoints.save_best(State(*parts()), 2, 0.7)) if best else (lambda: checkpoints.save(2, State(*parts())))
    third = threading.Thread(target=again, daemon=True)
    third.start()
    third.join(0.5)
    assert third.is_alive()
    disk.write()
    third.join(30)
    assert not third.is_alive()
    assert len(checkpoints._pending) == 2


def test_what_a_write_raises_reaches_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: Executor) -> None:
    monkeypatch.setattr(checkpoint, "atomic_write", broken)
    for hear in (lambda one: list(one.written()), lambda one: one.finish()):
        checkpoints, (model, optimizer) = beside(tmp_path, executor), parts()
        checkpoints.save(1, State(model, optimizer))
        checkpoints._pending[-1].exception(30)
        with pytest.raises(OSError, match="No space left"):
            hear(checkpoints)


def test_nothing_is_written_after_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: Executor) -> None:
    """Else a step would be kept that does not know its best model, and nobody would validate it again."""
    write, tries = checkpoint.atomic_write, iter([OSError(5, "Input/output error", "best"), None, None])

    def once_broken(path: Path, content: Any) -> None:
        if error := next(tries):
            raise error
        write(path, content)

    monkeypatch.setattr(checkpoint, "atomic_write", once_broken)
    checkpoints, state = beside(tmp_path, executor), State(*parts())
    checkpoints.save_best(state, 1, 0.5)
    checkpoints.save(1, state)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.finish()
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_before_a_write_that_failed_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: Executor
) -> None:
    checkpoints, state = beside(tmp_path, executor), State(*parts())
    checkpoints.save(1, state)
    checkpoints._pending[-1].result(30)
    monkeypatch.setattr(checkpoint, "atomic_write", broken)
    checkpoints.save(2, state)
    checkpoints._pending[-1].exception(30)
    told = checkpoints.written()
    assert next(told) == 1
    with pytest.raises(OSError, match="No space left"):
        next(told)


def test_a_checkpoint_covers_the_journal_as_it_was_when_it_was_copied(tmp_path: Path, disk: SlowDisk, executor: Executor) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.metrics({"train/loss": 1.0}, 1)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, SingleNode(), tmp_path / "journal.jsonl", executor)
    covered = (tmp_path / "journal.jsonl").stat().st_size
    checkpoints.save(1, State(*parts()))
    journal.metrics({"train/loss": 0.5}, 2)
    disk.write()
    checkpoints.finish()
    index = read_index(tmp_path / "checkpoints")
    assert index is not None
    assert index["checkpoints"][0]["journal"][0] == covered


def test_what_a_checkpoint_covers_of_the_journal_is_on_the_disk_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, done = tmp_path / "journal.jsonl", []
    write = checkpoint.atomic_write
    monkeypatch.setattr(checkpoint, "fsync_path", done.append)
    monkeypatch.setattr(checkpoint, "atomic_write", lambda path, content: (done.append(path), write(path, content)))
    for number, (given, synced) in enumerate([(None, []), (journal, []), (journal, [journal])]):
        done.clear()
        if synced:
            Journal(journal).metrics({"train/loss": 1.0}, 1)
        Checkpoints(tmp_path / str(number), 2, SingleNode(), given).save(1, State(*parts()))
        assert done == [*synced, tmp_path / str(number) / "step-00000001.safetensors"]


def test_copies_are_work_and_not_a_wait_for_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: Executor) -> None:
    phases: list[str] = []
    heartbeat = SingleNode.heartbeat
    monkeypatch.setattr(heartbeat, "computing", lambda: phases.append("computing"))
    monkeypatch.setattr(shards, "copied", lambda tensors: phases.append("copied") or (lambda: dict(tensors)))
    checkpoints = beside(tmp_path, executor)
    checkpoints.save(1, State(*parts()))
    checkpoints.finish()
    assert phases == ["computing", "copied"]


def test_files_are_those_of_a_training_that_waits_for_them(tmp_path: Path, executor: Executor) -> None:
    for folder, thread in ((tmp_path / "beside", executor), (tmp_path / "waiting", None)):
        checkpoints, (model, optimizer) = Checkpoints(folder, 2, SingleNode(), executor=thread), parts()
        for step, accuracy in ((1, 0.2), (2, 0.5), (3, 0.4), (4, 0.5), (5, 0.7)):
            descend(model, optimizer, range(step - 1, step))
            checkpoints.save_best(State(model, optimizer), step, accuracy)
            checkpoints.save(step, State(model, optimizer))
        checkpoints.finish()
        assert list(checkpoints.written()) == [1, 2, 3, 4, 5]
    beside, waiting = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("beside", "waiting"))
    assert beside == waiting
    assert len(beside) == 4


def test_ranks_go_on_beside_a_slow_disk_and_wait_for_it_at_the_end(
    tmp_path: Path, disk: SlowDisk, thread_ranks: Callable[..., list[Any]], executor: Executor
) -> None:
    saved = threading.Barrier(2)

    def work(group: Ranks) -> list[int]:
        checkpoints, (model, optimizer) = beside(tmp_path, executor, group), parts()
        checkpoints.save(1, State(model, optimizer))
        assert not list(tmp_path.glob("step-*"))
        saved.wait(30)
        # One rank's disk for both: whoever comes first lets it write.
        disk.write()
        checkpoints.finish()
        assert list(tmp_path.glob("step-*"))
        return list(checkpoints.written())

    assert thread_ranks(2, work) == [[1], []]
