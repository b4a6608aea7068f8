"""A training of six numbers in milliseconds: the product's loop, journal, checkpoints and files, around gradients that are made up."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.heartbeat import Heartbeat
from pipeline.runs import checkpoints as index
from pipeline.runs.identity import write_identity
from pipeline.runs.lock import run_lock
from pipeline.runs.status import Outcome, running
from pipeline.tracking import journal as journals
from pipeline.tracking.journal import Journal
from pipeline.training import loop
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.checkpoint_file import weights_sha256
from pipeline.training.clipping import Clipping
from pipeline.training.evaluation import Result
from pipeline.training.guard import NonFiniteGuard
from pipeline.training.schedule import Schedule
from pipeline.training.state import State


@dataclass(frozen=True)
class Plan:
    """When things happen, and how many answers of ten are correct, by the step of the validation."""

    steps: loop.Steps
    correct: dict[int, int]


PLAN = Plan(loop.Steps(total=6, per_epoch=3, per_log=1, per_checkpoint=2, global_batch=8), {3: 5, 6: 7})


class OnlyRank:
    """The first and only rank."""

    heartbeat = Heartbeat(None)

    def on_rank_zero(self, thing: Callable[[], Any], otherwise: Any) -> Any:
        return thing()

    def while_others_wait(self, thing: Callable[[], None]) -> None:
        thing()

    def broadcast_bytes(self, content: bytes) -> bytes:
        return content

    def broadcast(self, values: Tensor) -> None:
        pass

    def start_logical_or(self, flag: bool) -> Callable[[], bool]:
        return lambda: flag


class Model(nn.Module):
    """Six numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(4.0).view(2, 2))
            self.layer.bias.zero_()


class Gradients:
    """A strategy whose gradients are functions of the step and the weights."""

    def __init__(self, model: nn.Module):
        self._model = model

    def backward(self, step: int) -> "Gradients":
        for number, parameter in enumerate(self._model.parameters()):
            parameter.grad = parameter.detach() * 0.1 + (step + 1) / (number + 2)
        self.done = step + 1
        self._loss = float(sum(parameter.detach().abs().sum() for parameter in self._model.parameters()))
        return self

    def over_ranks(self) -> dict[str, float]:
        return {"train/loss": self._loss}


class Stop:
    """Stops before a step, or never."""

    def __init__(self, before: int | None):
        self._left = before

    def agreed(self) -> bool:
        if self._left is None:
            return False
        self._left -= 1
        return self._left < 0


def parts() -> tuple[Model, torch.optim.Optimizer]:
    """The model and its optimizer, as they begin."""
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The digest of weights and momenta."""
    momenta = {f"{key}": value["momentum_buffer"] for key, value in optimizer.state_dict()["state"].items()}
    return weights_sha256(dict(model.state_dict()) | momenta)


class Watch:
    """Hears what a training's checkpoints do."""

    def restored(self, step: int, state: str) -> None:
        """The training goes on from this step, in this state."""

    def saved(self, step: int) -> None:
        """The save of this step has returned."""


class Told(Checkpoints):
    """Checkpoints that tell what they do, and remember the states that they restored and saved."""

    def __init__(self, folder: Path, keep: int, ranks: Any, journal: Path, watch: Watch):
        super().__init__(folder, keep, ranks, journal)
        self._watch = watch
        # Digests of weights and momenta by step.
        self.states: dict[int, str] = {}
        self.restored = -1

    def restore(self, state: State) -> int:
        self.restored = super().restore(state)
        self.states[self.restored] = state_of(state.model, state.optimizer)
        self._watch.restored(self.restored, self.states[self.restored])
        return self.restored

    def save(self, step: int, state: State, validation_due: bool = False) -> None:
        super().save(step, state, validation_due)
        self.states[step] = state_of(state.model, state.optimizer)
        self._watch.saved(step)


def train(run: Path, keep: int = 2, steps: int | None = None, watch: Watch | None = None, plan: Plan = PLAN, ranks: Any = None) -> Told:
    """Do to a run's folder what a start of the train stage does, in its order; returns its checkpoints."""
    with run_lock(run / "lock"), ExitStack() as opened:
        write_identity(run, {"seed": 1})
        index.newest(run)
        journal = opened.enter_context(closing(Journal(run / "journal.jsonl")))
        if not journals.last(run / "journal.jsonl", "run"):
            journal.event("run", id="x", experiment="lossy", name="lossy", params={}, tags={})
        journal.event("started", stage="train", tags={})
        journal.sync()
        running(run, 0, "again")
        found = Told(run / "checkpoints", keep, ranks or OnlyRank(), run / "journal.jsonl", watch or Watch())
        _as_rank(run, found, steps, plan)
        journal.event("ended", stage="train", outcome="done" if steps is None else "stopped", cause="")
        Outcome("done", 0, "", None, plan.steps.total, None, "").write(run)
    return found


def _as_rank(run: Path, found: Told, steps: int | None, plan: Plan) -> None:
    model, optimizer = parts()
    gradients, state = Gradients(model), State(model, optimizer)
    with closing(Journal(run / "journal.jsonl")) as journal:
        step, done = loop.run(
            plan.steps,
            loop.Parts(
                strategy=gradients,
                state=state,
                guard=NonFiniteGuard(state, found._ranks, lambda step: ""),
                clipping=Clipping(state, found._ranks, None),
                schedule=Schedule("cosine", 0.1, 1, plan.steps.total),
                checkpoints=found,
                journal=journal,
                stop=Stop(steps),
                validate=lambda: Result(0.5, plan.correct[gradients.done], 10, 10, torch.zeros(2, 2)),
            ),
        )
        if done:
            journal.event("finished", step=step, weights_sha256=weights_sha256(model.state_dict()))
        else:
            journal.event("stopped", step=step)
