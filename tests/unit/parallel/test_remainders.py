"""The bits of an element's update do not depend on the share that it is in."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from pipeline.parallel.remainders import Remainders, remainder, vector_elements

# Weights and biases of LeNet's kinds, the first two in channels-last memory order.
SHAPES = [(6, 1, 5, 5), (16, 6, 5, 5), (120, 400), (84,), (10,), (7, 3)]
STEPS = 100


def sgd(parameters: list[Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True)


def adamw(parameters: list[Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def updated(
    build: Callable[[list[Parameter]], Optimizer], shape: tuple[int, ...], ranks: int, follow: bool = True
) -> tuple[Tensor, Tensor]:
    """A tensor after some steps, and the same one updated in shares."""
    torch.manual_seed(0)
    first = torch.randn(shape)
    whole = Parameter(first.to(memory_format=torch.channels_last) if len(shape) == 4 else first.clone())
    rows = -(-len(first) // ranks)
    places = remainder(whole.detach()).split(rows)
    shares = [Parameter(one.contiguous().clone()) for one in first.split(rows)]
    optimizer, optimizers = build([whole]), [build([one]) for one in shares]
    for share, own, place in zip(shares, optimizers, places, strict=True):
        if follow:
            Remainders([(share, place, whole.numel() % vector_elements())], own)
    for _ in range(STEPS):
        gradient = torch.randn(shape)
        whole.grad = torch.empty_like(whole).copy_(gradient)
        optimizer.step()
        for share, own, part in zip(shares, optimizers, gradient.split(rows), strict=True):
            share.grad = part.contiguous().clone()
            own.step()
    return whole.detach(), torch.cat([one.detach() for one in shares])


@pytest.mark.parametrize("build", [sgd, adamw])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_are_updated_as_the_whole_is(build: Callable[[list[Parameter]], Optimizer], ranks: int) -> None:
    for shape in SHAPES:
        whole, shared = updated(build, shape, ranks)
        assert torch.equal(whole, shared), shape


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU's vectors round as its scalars do")
@pytest.mark.parametrize("build", [sgd, adamw])
def test_shares_alone_would_not_have_the_bits_of_the_whole(build: Callable[[list[Parameter]], Optimizer]) -> None:
    assert not all(torch.equal(*updated(build, shape, 3, follow=False)) for shape in SHAPES)


def test_a_loss_that_is_no_number_updates_nothing() -> None:
    share = Parameter(torch.ones(10))
    optimizer = sgd([share])
    Remainders([(share, remainder(torch.ones(20))[10:], 20 % vector_elements())], optimizer)
    share.grad = torch.ones(10)
    optimizer.found_inf = torch.ones(())  # pyright: ignore
    optimizer.step()
    assert torch.equal(share.detach(), torch.ones(10))


def test_a_state_that_was_loaded_is_gone_on_from() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(6, 37)

    def run(parts: list[int]) -> Tensor:
        share = Parameter(torch.zeros(37))
        state = None
        for begin, end in zip([0, *parts], [*parts, 6], strict=True):
            optimizer = adamw([share])
            Remainders([(share, remainder(torch.zeros(74))[:37], 74 % vector_elements())], optimizer)
            if state is not None:
                optimizer.load_state_dict(state)
            for gradient in gradients[begin:end]:
                share.grad = gradient.clone()
                optimizer.step()
            state = optimizer.state_dict()
        return share.detach()

    assert torch.equal(run([]), run([2, 3]))
