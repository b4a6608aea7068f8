"""The learning rate of every step, and the optimizer that takes it."""

import pytest
import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from pipeline.config import Train
from pipeline.training import schedule
from pipeline.training.schedule import Schedule


def rates(kind: str, peak: float, warmup_steps: int, total_steps: int) -> list[float]:
    """What torch's own schedulers give to every step."""
    optimizer = torch.optim.SGD([Parameter(torch.zeros(1))], lr=peak)
    falling: LRScheduler = (
        ConstantLR(optimizer, 1.0, 1) if kind == "constant" else CosineAnnealingLR(optimizer, max(1, total_steps - warmup_steps))
    )
    whole = falling
    if warmup_steps:
        # From a part of the peak to all of it in the last step of the warm-up.
        rising = LinearLR(optimizer, 1 / warmup_steps, 1.0, max(1, warmup_steps - 1))
        whole = SequentialLR(optimizer, [rising, falling], [warmup_steps])
    found = []
    for _ in range(total_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        whole.step()
    return found


@pytest.mark.parametrize("kind", ["cosine", "constant"])
@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 40), (1, 40), (10, 40), (39, 40), (40, 40), (211, 2110)])
def test_the_rate_of_every_step_is_that_of_torchs_schedulers(kind: str, warmup_steps: int, total_steps: int) -> None:
    ours = Schedule(kind, 0.3, warmup_steps, total_steps)
    assert [ours.rate(step) for step in range(total_steps)] == pytest.approx(
        rates(kind, 0.3, warmup_steps, total_steps), rel=1e-9, abs=1e-12
    )


def test_the_optimizer_has_the_settings_and_takes_the_rate_of_a_step() -> None:
    parameter = [Parameter(torch.ones(3))]
    built = schedule.optimizer(Train(learning_rate=0.2, momentum=0.7, weight_decay=0.03), parameter)
    assert isinstance(built, torch.optim.SGD)
    assert (built.defaults["lr"], built.defaults["momentum"], built.defaults["weight_decay"]) == (0.2, 0.7, 0.03)
    built = schedule.optimizer(Train(optimizer="adamw", momentum=None, learning_rate=0.2, weight_decay=0.03), parameter)
    assert isinstance(built, torch.optim.AdamW)
    assert (built.defaults["lr"], built.defaults["weight_decay"]) == (0.2, 0.03)
    Schedule("constant", 0.4, 2, 10).apply(built, 0)
    assert built.param_groups[0]["lr"] == 0.2
