"""Memory orders: channels-last weights, where who holds them takes plain order alone, and many tensors in one flat one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def keep_layouts(model: nn.Module) -> None:
    """Let modules go on to compute with channels-last weights: other kernels, and other sums, would round differently."""

    def in_order(own: dict[str, Any], names: list[str], forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        plain = {name: own[name] for name in names}
        own.update({name: one.to(memory_format=torch.channels_last) for name, one in plain.items()})
        try:
            return forward(*inputs, **named)
        finally:
            own.update(plain)

    modules: list[Any] = list(model.modules())
    for module in modules:
        own = {name: one for name, one in module._parameters.items() if one is not None and one.ndim == 4}
        # By strides: with one channel, or one pixel, a weight is contiguous in both orders.
        names = [name for name, one in own.items() if one.stride() != torch.empty(one.shape, device="meta").stride()]
        if names:
            module.forward = partial(in_order, module._parameters, names, module.forward)


def flat(gradients: list[Tensor], owners: list[Tensor]) -> Tensor:
    """Gradients one behind the other, each in the memory order of its parameter, as DDP lays them out in a bucket.

    `bucket.gradients()` would not do: it shows the bytes of a channels-last gradient as if they were in plain order.
    """
    pieces = [
        (gradient if _same_layout(gradient, owner) else torch.empty_like(owner).copy_(gradient)).as_strided((owner.numel(),), (1,))
        for gradient, owner in zip(gradients, owners, strict=True)
    ]
    return torch.cat(pieces)


def views(values: Tensor, owners: list[Tensor]) -> list[Tensor]:
    """One flat tensor as parameters lie in memory."""
    pieces = values.split([one.numel() for one in owners])
    return [piece.as_strided(one.size(), one.stride(), piece.storage_offset()) for piece, one in zip(pieces, owners, strict=True)]


def _same_layout(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape have their values in one order; the stride of a dimension of size 1 is free."""
    return all(size == 1 or mine == theirs for size, mine, theirs in zip(one.shape, one.stride(), other.stride(), strict=True))
