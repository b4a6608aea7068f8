"""SyncBatchNorm: statistics over the micro-batches of all ranks. torch's own takes tensors on GPUs alone (2.14)."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from pipeline.ranks import Ranks


def synchronize(model: nn.Module, ranks: Ranks) -> None:
    """Let each BatchNorm of a model see all ranks while it trains; its name and its tensors stay what they are."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.forward = partial(forward, layer, layer.forward, ranks)  # pyright: ignore[reportAttributeAccessIssue]


def forward(layer: Any, alone: Any, ranks: Ranks, images: Tensor) -> Tensor:
    """Normalize by the mean and the variance over all ranks, and follow them with the running statistics."""
    if not layer.training:
        return alone(images)
    # In fp32 at least.
    values = images.to(torch.promote_types(images.dtype, torch.float32))
    dimensions = [one for one in range(values.ndim) if one != 1]
    # One more place for the number of values, which is the same for every channel.
    sums = torch.cat([values.sum(dimensions), values.new_tensor([values.numel() / values.shape[1]])])
    sums = Summed.apply(sums, ranks)  # pyright: ignore
    count, shape = sums[-1], [1, -1, *[1] * (values.ndim - 2)]
    mean = sums[:-1] / count
    centered = values - mean.view(shape)
    variance = Summed.apply(centered.square().sum(dimensions), ranks) / count  # pyright: ignore
    _follow(layer, mean.detach(), variance.detach(), count.detach())
    found = centered * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.affine:
        found = found * layer.weight.view(shape) + layer.bias.view(shape)
    return found.to(images.dtype)


@torch.no_grad()
def _follow(layer: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    if not layer.track_running_stats:
        return
    layer.num_batches_tracked += 1
    share = 1 / layer.num_batches_tracked.to(mean.dtype) if layer.momentum is None else layer.momentum
    layer.running_mean += share * (mean - layer.running_mean)
    layer.running_var += share * (variance * count / (count - 1) - layer.running_var)


class Summed(Function):
    """The sum over ranks; each rank's part has the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks) -> Tensor:  # pyright: ignore
        """All-reduce."""
        ctx.ranks = ranks
        return _all_reduced(own, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        """All-reduce."""
        return _all_reduced(gradient, ctx.ranks), None


def _all_reduced(own: Tensor, ranks: Ranks) -> Tensor:
    total = own.clone(memory_format=torch.contiguous_format)
    ranks.heartbeat.waiting()
    dist.all_reduce(total)
    ranks.heartbeat.computing()
    return total
