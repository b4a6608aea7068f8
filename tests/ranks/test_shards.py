"""A checkpoint of ranks that hold parts: no rank ever holds all of it, and it is written beside the training."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from pipeline import parallel
from pipeline.config import Dist
from pipeline.parallel.lanes import Lanes, Task
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.shards import Shards, read_everywhere
from pipeline.training.state import MODEL, State
from tests.ranks.test_fsdp import kept_bytes

WIDTH, LAYERS = 96, 12


def built(group: Any, strategy: str, seed: int = 0) -> State:
    """Twelve layers of equal size under a strategy, with momenta."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    task = Task(model, lambda step, lane: (torch.ones(2, WIDTH), torch.zeros(2, dtype=torch.int64)), 3, 0.0, nullcontext)
    settings = Dist.model_construct(strategy=strategy, reduction="native" if strategy == "tensor" else "ordered")
    built = parallel.build(task, Lanes([1] * group.size, group.rank, 2 * group.size), group, settings)
    optimizer = torch.optim.SGD([*built.parameters.values()], lr=0.1, momentum=0.9)
    for number, one in enumerate(built.parameters.values()):
        one.grad = torch.full_like(one, float(number))
    optimizer.step()
    return State(model, optimizer, built, group)


def bytes_while_written(group: Any, strategy: str) -> tuple[float, float]:
    """What this rank's copies take, and what it holds at most while the file is written, as shares of all that is in the file."""
    state = built(group, strategy)
    everything = sum(4 * one.shape.numel() for one in state.entries())
    before = kept_bytes()
    shards = Shards(state, "", group)
    own = most = kept_bytes() - before

    def at_most(state: Any) -> None:
        nonlocal most
        for number, _ in enumerate(state):
            # To look takes long.
            most = most if number % 5 else max(most, kept_bytes() - before)

    group.on_rank_zero(lambda: at_most(shards.file()._tensors), None)
    if most == own:
        shards.exchange()
    return own / everything, most / everything


IN_PARTS = ("fsdp", "pipeline", "tensor")


def test_no_rank_holds_more_than_its_part_and_one_tensor_while_a_checkpoint_is_written(run_ranks) -> None:
    for shares in run_ranks(4, *((bytes_while_written, (strategy,)) for strategy in IN_PARTS)):
        for strategy, (own, most) in zip(IN_PARTS, shares, strict=True):
            assert 0.2 < own < 0.3, strategy
            assert most < own + 2 / LAYERS, strategy


def bytes_while_read(group: Any, path: Path) -> float:
    """What this rank holds at most while the file is read, as a share of all that is in the file."""
    before, most = kept_bytes(), 0
    _, tensors = read_everywhere(path, group)
    for number, _ in enumerate(tensors):
        most = most if number % 5 else max(most, kept_bytes() - before)
    return most / path.stat().st_size


def saved(group: Any, folder: Path, strategy: str, beside: bool) -> dict[str, Any]:
    """Save beside steps that go on, some of which are no better than one that rank 0 knows of."""
    state = built(group, strategy)
    with ThreadPoolExecutor(1) if beside else nullcontext() as executor:
        Checkpoints(folder, 2, group).save_best(state, 1, 0.75)
        # As after a start: that 0.75 is better stands in the index of rank 0 alone.
        checkpoints = Checkpoints(folder, 2, group, executor=executor)
        for step, accuracy in ((2, 0.5), (3, 0.875)):
            state.optimizer.step()
            checkpoints.save_best(state, step, accuracy)
            checkpoints.save(step, state)
            state.optimizer.step()
        checkpoints.finish()
    assert group.rank or list(checkpoints.written()) == [2, 3]
    other = built(group, strategy, seed=1)
    assert Checkpoints(folder, 2, group).restore(other) == 3
    return {name: value.clone() for name, value in other.whole()}


def test_a_file_has_what_ddp_writes_at_this_step_and_is_read_a_tensor_at_a_time(tmp_path: Path, run_ranks) -> None:
    run_ranks(1, (saved, (tmp_path / "ddp", "ddp", False)))
    found = run_ranks(3, *((saved, (tmp_path / strategy, strategy, True)) for strategy in IN_PARTS))
    expected = {path.name: path.read_bytes() for path in (tmp_path / "ddp").iterdir()}
    names = ["best-00000003.safetensors", "step-00000002.safetensors", "step-00000003.safetensors"]
    assert sorted(expected) == [names[0], "index.json", *names[1:]]
    assert json.loads(expected["index.json"])["best"]["step"] == 3
    tensors = load_file(tmp_path / "ddp" / names[-1])
    assert any(name.startswith(MODEL) for name in tensors)
    for strategy in IN_PARTS:
        assert {path.name: path.read_bytes() for path in (tmp_path / strategy).iterdir()} == expected, strategy
    for state in (state for states in found for state in states):
        assert state.keys() == tensors.keys()
        assert all(torch.equal(value, tensors[name]) for name, value in state.items())
    for (share,) in run_ranks(2, (bytes_while_read, (tmp_path / "ddp" / names[-1],))):
        assert share < 2.5 / LAYERS
