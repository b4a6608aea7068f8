"""The parts of an elastic training: who gets what from whom, and what is undone of a step that was not finished."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import collectives
from pipeline.elastic.agreement import Agreed, Regroup, Reshare
from pipeline.elastic.handover import Handover
from pipeline.elastic.speeds import Speeds
from pipeline.elastic.training import Redoable, is_loss
from pipeline.parallel.lanes import Lanes
from pipeline.ranks import Ranks
from pipeline.tracking.journal import CHECKPOINT, Journal
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.guard import Diverged, NonFiniteGuard
from pipeline.training.loop import Position
from pipeline.training.state import State

NOBODY: Any = None


def trained(updates: int, rank: int = 0) -> State:
    """A model with BatchNorm after some updates, with an average."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    state = State(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), ema_decay=0.9)
    for step in range(updates):
        model(torch.ones(5, 3) * (1 + step) + torch.arange(5)[:, None]).square().sum().backward()
        state.optimizer.step()
        state.average.update(step)
    return state


def met(group: Ranks, folder: Path, positions: list[Position | None], writer: int | None) -> dict[str, Any]:
    """What a rank knows after it has met others, which are at these positions."""
    at = positions[group.rank]
    state = trained(at.step if at else 0, group.rank if at is None else 0)
    guard = NonFiniteGuard(state, group, lambda step: "")
    checkpoints = Checkpoints(folder / "checkpoints", 3, group, folder / "journal.jsonl")
    if at is not None and at.step == max(one.step for one in positions if one):
        guard.take({"first": 1, "good_steps": at.step - 1, "bad": 1.0})
        checkpoints.take({"saved": 2, "best": (2, 0.5)})
    handover = Handover(state, guard, checkpoints, group)
    handover.at = at
    found = handover.meet(group.rank == writer)
    whole = {name: value.tolist() for name, value in state.whole()}
    assert handover.at is found
    facts = {"at": found, "anew": handover.anew, "whole": whole}
    return facts | {"guard": guard.marks, "checkpoints": checkpoints.marks, "written": [*checkpoints.written()]}


def test_whoever_is_behind_gets_all_from_whoever_is_farthest(run_ranks: Any, tmp_path: Path) -> None:
    positions = [Position(3), Position(4, due=False, figures={"train/loss": 0.1}), None, Position(4)]
    found = [results[0] for results in run_ranks(4, (met, (tmp_path, positions, 0)))]
    expected = {name: value.tolist() for name, value in trained(4).whole()}
    for one in found:
        assert one["whole"] == expected
        assert not one["anew"]
        assert one["guard"] == {"first": 1, "good_steps": 3, "bad": 1.0}
        assert one["checkpoints"]["saved"] == 2
        assert (one["at"].step, one["at"].due, one["at"].save) == (4, True, False)
    # Those behind have them from the farthest.
    assert [one["at"].figures for one in found[:3]] == [{"train/loss": 0.1}] * 3


def test_who_has_just_come_makes_nobody_do_anything_again(run_ranks: Any, tmp_path: Path) -> None:
    found = [results[0] for results in run_ranks(3, (met, (tmp_path, [Position(4), None, Position(4)], 0)))]
    assert [(one["at"].step, one["at"].due, one["at"].save) for one in found] == [(4, False, False)] * 3
    assert found[1]["whole"] == found[0]["whole"]


def differing(group: Ranks, folder: Path) -> dict[str, Any]:
    """Two ranks at one step, of which one was still in the save of it that the other has begun."""
    state = trained(4)
    checkpoints = Checkpoints(folder / "checkpoints", 3, group)
    checkpoints.take({"saved": 4 if group.rank else 2, "best": (-1, -1.0)})
    handover = Handover(state, NonFiniteGuard(state, group, lambda step: ""), checkpoints, group)
    handover.at = Position(4, due=not group.rank, save=not group.rank)
    at = handover.meet(group.rank == 0)
    return {"at": (at.step, at.due, at.save), "saved": checkpoints.marks["saved"]}


def test_what_ranks_do_not_agree_on_is_done_again_by_all(run_ranks: Any, tmp_path: Path) -> None:
    found = [results[0] for results in run_ranks(2, (differing, (tmp_path,)))]
    assert found == [{"at": (4, True, True), "saved": -1}] * 2


def test_where_the_one_that_wrote_is_lost_all_save_at_once(run_ranks: Any, tmp_path: Path) -> None:
    state = trained(2)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 3, alone(), tmp_path / "journal.jsonl")
    checkpoints.save(2, state)
    Journal(tmp_path / "journal.jsonl").close()
    found = [results[0] for results in run_ranks(2, (met, (tmp_path, [Position(4), Position(4)], None)))]
    assert [(one["at"].due, one["at"].save, one["checkpoints"]["saved"]) for one in found] == [(True, True, -1)] * 2
    # It was killed between a checkpoint and the line behind it.
    assert [one["written"] for one in found] == [[2], []]


def test_where_nobody_has_weights_all_go_on_from_the_checkpoint(run_ranks: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    Checkpoints(tmp_path / "checkpoints", 3, alone(), tmp_path / "journal.jsonl").save(2, trained(2))
    journal.event(CHECKPOINT, step=2)
    found = [results[0] for results in run_ranks(2, (met, (tmp_path, [None, None], None)))]
    for one in found:
        assert one["whole"] == {name: value.tolist() for name, value in trained(2).whole()}
        assert (one["at"].step, one["at"].due) == (2, False)


def alone() -> Ranks:
    """A rank that nobody has to wait for."""
    return SimpleNamespace(  # type: ignore[return-value]
        on_rank_zero=lambda thing, otherwise: thing(),
        while_others_wait=lambda thing: thing(),
        heartbeat=SimpleNamespace(computing=lambda: None),
    )


def test_a_step_that_was_not_finished_leaves_the_buffers_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def backward(step: int) -> None:
        model(torch.randn(5, 3))

    strategy = Redoable(SimpleNamespace(backward=backward, reads=range(2)), model)  # type: ignore[arg-type]
    strategy.backward(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    strategy.backward(1)
    assert not torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])
    strategy.undo()
    assert strategy.step == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def asked(group: Ranks, outdated: bool, stops: int, leads: bool = True) -> list[str]:
    """What a rank is told between steps, while one may be asked to stop, or to leave."""
    left = list[str]()
    member = SimpleNamespace(is_outdated=lambda: outdated, leave=lambda: left.append("left"))
    agreed, found = Agreed(group, 600, member, leads), list[str]()  # type: ignore[arg-type]
    if group.rank == stops:
        agreed._asked = True
    for _ in range(3):
        try:
            found.append("stop" if agreed.agreed() else "go on")
        except Regroup:
            found.append("regroup")
    agreed.close()
    return found + left


def test_all_ranks_agree_to_stop_or_to_enter_another_group(run_ranks: Any) -> None:
    cases = {(False, -1): "go on", (True, -1): "regroup", (False, 1): "stop", (True, 1): "stop"}
    for results in run_ranks(2, *((asked, case) for case in cases)):
        # Whoever regroups asks again in another group.
        assert results == [["go on", answer, "go on" if answer == "regroup" else answer] for answer in cases.values()]


def test_a_rank_of_another_machine_leaves_and_says_so_once(run_ranks: Any) -> None:
    for results in run_ranks(2, (asked, (False, 1, False))):
        assert results[0][:3] == ["go on"] * 3
    assert results[0][3:] == ["left"]


def asked_to_reshare(group: Ranks) -> list[str]:
    """What a rank is told that knows better shares, as all do."""
    agreed, found = Agreed(group, 600, SimpleNamespace(is_outdated=lambda: False), True), list[str]()  # type: ignore[arg-type]
    agreed.reshares = True
    for ask in (agreed.stops, agreed.agreed, agreed.agreed):
        try:
            found.append(str(ask()))
        except Reshare:
            found.append("reshare")
    agreed.close()
    return found


def test_lanes_are_shared_out_anew_between_steps_and_not_within_a_validation(run_ranks: Any) -> None:
    assert run_ranks(2, (asked_to_reshare, ())) == [[["False", "reshare", "False"]]] * 2


def shared_out(group: Ranks, milliseconds: list[float]) -> list[Any]:
    """Whether lanes are to move after steps that took so long, and how."""
    lanes, speeds = Lanes([4, 4, 4], group.rank, 96), Speeds(0.001)
    figures = {f"system/rank_{rank}_step_milliseconds": one for rank, one in enumerate(milliseconds)}
    return [speeds.learn(figures, lanes), speeds.shared_out(lanes, group).per_rank]


def test_lanes_move_where_that_is_worth_it(run_ranks: Any) -> None:
    cases = {(20, 20, 40): [True, [5, 5, 2]], (20, 22, 21): [False, [4, 4, 4]], (20, 0, 40): [False, [4, 4, 4]]}
    for results in run_ranks(3, *((shared_out, ([float(one) for one in case],)) for case in cases)):
        assert results == [*cases.values()]


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:3297"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (Diverged("Connection closed by peer"), False),
    ],
)
def test_a_lost_connection_is_told_from_what_is_wrong_with_this_rank(error: RuntimeError, loss: bool) -> None:
    assert is_loss(error) == loss


def waits(group: Ranks, in_vain: bool) -> str:
    """What a rank hears of a collective to which the other comes late, told or not that it waits in vain."""
    event = collectives.watch()
    if in_vain:
        event.set()
    try:
        time.sleep(1.2 * group.rank)
        return str(group.start_maximum(group.rank)())
    except RuntimeError as error:
        return str(error)
    finally:
        collectives.in_vain = None


def test_a_rank_waits_for_a_late_one_until_it_is_told_that_it_waits_in_vain(run_ranks: Any) -> None:
    results = run_ranks(2, (waits, (False,)), (waits, (True,)))
    assert results == [["1", "Connection closed by a peer, and gloo waits on"], ["1", "1"]]
