"""The best model, and the index that is made anew from the files where it is damaged or missing."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.config import MachineError
from pipeline.files import write_checksummed_json
from pipeline.runs.checkpoints import INDEX, read_index
from pipeline.training.checkpoint import Checkpoints, read_or_rebuild_index
from pipeline.training.checkpoint_file import proven, weights_sha256
from pipeline.training.state import State
from tests.unit.training.test_checkpoint import SingleNode, packed, parts


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def best_of(folder: Path, *told: tuple[int, float]) -> tuple[int, float]:
    model, optimizer = parts()
    checkpoints = Checkpoints(folder, 1, SingleNode())
    for step, accuracy in told:
        checkpoints.save_best(State(model, optimizer), step, accuracy)
    best = read_or_rebuild_index(folder)["best"]
    assert list(folder.glob("best-*")) == [folder / best["file"]]
    assert best["sha256"] == sha256((folder / best["file"]).read_bytes())
    assert weights_sha256(load_file(folder / best["file"])) == weights_sha256(model.state_dict())
    assert proven(folder / best["file"]) == {"step": str(best["step"]), "accuracy": repr(best["accuracy"])}
    return best["step"], best["accuracy"]


def test_the_best_is_that_with_the_highest_accuracy_of_equals_the_first_and_of_one_step_the_newest(tmp_path: Path) -> None:
    assert best_of(tmp_path / "a", (10, 0.5)) == (10, 0.5)
    assert best_of(tmp_path / "b", (10, 0.5), (20, 0.7), (30, 0.7), (40, 0.6)) == (20, 0.7)
    assert best_of(tmp_path / "c", (10, 0.5), (10, 0.25)) == (10, 0.25)
    assert (tmp_path / "b" / "best-00000020.safetensors").exists()


def test_ranks_other_than_the_first_write_no_best_model(tmp_path: Path, thread_ranks: Callable[..., list[Any]]) -> None:
    model, optimizer = parts()
    thread_ranks(2, lambda group: Checkpoints(tmp_path / str(group.rank), 1, group).save_best(State(model, optimizer), 10, 0.5))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["0"]


def trained(folder: Path) -> dict[str, Any]:
    """Two checkpoints and the best model between them, and the index of all."""
    model, optimizer = parts()
    checkpoints = Checkpoints(folder, 2, SingleNode())
    for step, accuracy in ((2, 0.5), (4, 0.75), (6, 0.75)):
        checkpoints.save_best(State(model, optimizer), step, accuracy)
        checkpoints.save(step, State(model, optimizer))
    index = read_index(folder)
    assert index is not None
    return index


def rebuilt(index: dict[str, Any]) -> dict[str, Any]:
    """What the files tell: of the journal, only how many lines of metrics it had."""
    entries = [{name: value for name, value in entry.items() if name != "journal"} | {"metrics": 0} for entry in index["checkpoints"]]
    return {"checkpoints": entries, "best": index["best"]}


def test_a_damaged_index_is_made_anew_from_the_files_and_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = trained(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    assert read_or_rebuild_index(tmp_path) == rebuilt(index)
    assert caplog.messages == [f"{tmp_path / INDEX} is damaged or missing; it is made anew from 3 files"]
    assert read_index(tmp_path) is None
    assert Checkpoints(tmp_path, 2, SingleNode()).restore(State(*parts())) == 6
    assert read_index(tmp_path) == rebuilt(index)


def test_a_missing_index_is_made_anew_too_and_a_file_that_proves_nothing_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = trained(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "step-00000006.safetensors").write_bytes(b"")
    found = read_or_rebuild_index(tmp_path)
    assert [entry["step"] for entry in found["checkpoints"]] == [4]
    assert found["best"] == index["best"]
    assert "made anew from 3 files" in caplog.text


def test_the_newest_checkpoint_knows_the_best_model_also_if_its_file_is_damaged(tmp_path: Path) -> None:
    index = trained(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / index["best"]["file"]).write_bytes(b"")
    assert read_or_rebuild_index(tmp_path)["best"] == index["best"]


def rebuilt_best(folder: Path, *told: tuple[int, float]) -> tuple[int, float] | None:
    """What is the best model where no checkpoint knows of one."""
    folder.mkdir()
    tensors: dict[str, Tensor] = {"a": torch.ones(1)}
    (folder / "step-00000001.safetensors").write_bytes(packed(tensors, step="1", best="null"))
    for step, accuracy in told:
        (folder / f"best-{step:08d}.safetensors").write_bytes(packed(tensors, step=str(step), accuracy=repr(accuracy)))
    best = read_or_rebuild_index(folder).get("best")
    return (best["step"], best["accuracy"]) if best else None


def test_of_several_best_models_the_best_is_found_and_of_equals_the_first(tmp_path: Path) -> None:
    assert rebuilt_best(tmp_path / "a", (10, 0.5), (20, 0.75), (30, 0.75), (40, 0.25)) == (20, 0.75)
    assert rebuilt_best(tmp_path / "b") is None
    assert "best" not in read_or_rebuild_index(tmp_path / "b")


def test_a_run_that_has_not_begun_has_an_empty_index_and_nothing_is_said_or_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    assert read_or_rebuild_index(folder) == {"checkpoints": []}
    assert Checkpoints(folder, 2, SingleNode()).restore(State(*parts())) == 0
    assert caplog.text == ""
    assert not folder.exists()


def test_a_restore_writes_nothing_where_all_is_well(tmp_path: Path) -> None:
    trained(tmp_path)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert Checkpoints(tmp_path, 2, SingleNode()).restore(State(*parts())) == 6
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before


def test_every_rank_of_a_run_that_has_not_begun_starts_at_0(tmp_path: Path, thread_ranks: Callable[..., list[Any]]) -> None:
    assert thread_ranks(2, lambda group: Checkpoints(tmp_path / "checkpoints", 2, group).restore(State(*parts()))) == [0, 0]


def test_a_damaged_index_without_files_is_told_of_before_it_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / INDEX).write_text("")
    with pytest.raises(MachineError):
        read_or_rebuild_index(tmp_path)
    assert caplog.messages == [f"{tmp_path / INDEX} is damaged or missing; it is made anew from 0 files"]


def test_a_best_model_alone_is_kept_where_no_checkpoint_was_written(tmp_path: Path) -> None:
    model, optimizer = parts()
    Checkpoints(tmp_path, 2, SingleNode()).save_best(State(model, optimizer), 2, 0.5)
    best = read_or_rebuild_index(tmp_path)["best"]
    (tmp_path / INDEX).unlink()
    assert read_or_rebuild_index(tmp_path) == {"checkpoints": [], "best": best}


@pytest.mark.parametrize(
    ("step_files", "index", "count"), [(["a", "b"], False, " of 2"), ([], True, ", and the journal tells of some"), (["a"], True, " of 1")]
)
def test_no_proof_of_any_checkpoint_where_there_were_some_is_an_error(
    step_files: list[str], index: bool, count: str, tmp_path: Path
) -> None:
    for name in step_files:
        (tmp_path / f"step-{name}.safetensors").write_bytes(b"")
    (tmp_path / "best-00000001.safetensors").write_bytes(packed({"a": torch.ones(1)}, step="1", accuracy="0.5"))
    if index:
        (tmp_path / INDEX).write_text("")
    with pytest.raises(MachineError, match=f"{tmp_path}: no good checkpoint is left{count}"):
        read_or_rebuild_index(tmp_path)


def test_files_that_nobody_lists_and_halves_of_files_are_removed(tmp_path: Path) -> None:
    for name in ("step-00000001.safetensors", "best-00000001.safetensors", ".step-00000002.safetensors.partial", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    write_checksummed_json(tmp_path / INDEX, {"checkpoints": []})
    Checkpoints(tmp_path, 3, SingleNode()).save(3, State(*parts()))
    assert sorted(path.name for path in tmp_path.iterdir()) == [INDEX, "notes.txt", "step-00000003.safetensors"]
