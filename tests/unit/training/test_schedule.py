"""The learning rate as a function of the step, against torch's own schedulers, and the optimizer of params.yaml."""

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from pipeline.config import Config, Train
from pipeline.training.schedule import Schedule, autocast_dtype, build, optimizer


def weights() -> list[Parameter]:
    return [Parameter(torch.ones(3))]


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_the_rate_rises_by_equal_steps_to_its_peak(kind: str) -> None:
    schedule = Schedule(kind, 0.8, warmup_steps=4, total_steps=20)
    assert [schedule.rate(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def test_a_constant_rate_stays_at_its_peak() -> None:
    assert {Schedule("constant", 0.8, warmup_steps=0, total_steps=20).rate(step) for step in range(21)} == {0.8}


def test_a_cosine_is_that_of_torch_after_the_warm_up() -> None:
    schedule = Schedule("cosine", 0.8, warmup_steps=4, total_steps=20)
    theirs = SGD(weights(), lr=0.8)
    scheduler = CosineAnnealingLR(theirs, T_max=16)
    for step in range(4, 21):
        assert schedule.rate(step) == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-12)
        theirs.step()
        scheduler.step()
    assert schedule.rate(20) == 0
    assert schedule.rate(12) == pytest.approx(0.4)


def test_a_run_that_is_all_warm_up_ends_at_its_peak() -> None:
    schedule = Schedule("cosine", 0.8, warmup_steps=4, total_steps=4)
    assert [schedule.rate(3), schedule.rate(4)] == [0.8, 0.8]


def test_a_single_step_after_the_warm_up_goes_all_the_way_down() -> None:
    schedule = Schedule("cosine", 0.8, warmup_steps=4, total_steps=5)
    assert [schedule.rate(4), schedule.rate(5)] == [0.8, 0]


def test_a_schedule_counts_the_epochs_of_params_yaml_in_steps() -> None:
    config = Config(train=Train(schedule="constant", learning_rate=0.3, warmup_epochs=2, epochs=5))
    assert build(config, 7) == Schedule("constant", 0.3, warmup_steps=14, total_steps=35)


def test_the_rate_of_a_step_is_set_in_every_group() -> None:
    made = SGD([{"params": weights()}, {"params": weights()}], lr=1.0)
    Schedule("cosine", 0.8, warmup_steps=4, total_steps=20).apply(made, 1)
    assert [group["lr"] for group in made.param_groups] == [0.4, 0.4]


def test_sgd_and_adamw_take_their_settings_and_are_fused() -> None:
    sgd = optimizer(Train(learning_rate=0.3, momentum=0.8, weight_decay=0.01), weights())
    adamw = optimizer(Train(optimizer="adamw", learning_rate=0.3, momentum=None, weight_decay=0.02), weights())
    assert (type(sgd), type(adamw)) == (SGD, AdamW)
    for made, weight_decay in ((sgd, 0.01), (adamw, 0.02)):
        (group,) = made.param_groups
        assert (group["lr"], group["weight_decay"], group["fused"], len(group["params"])) == (0.3, weight_decay, True, 1)
    assert sgd.param_groups[0]["momentum"] == 0.8


def test_only_bf16_computes_in_another_type() -> None:
    assert autocast_dtype("bf16") == torch.bfloat16
    assert autocast_dtype("fp32") is None
