"""What products of square matrices reach on this machine, on every rank at once, one thread each: `torchrun bench/peak.py SECONDS`."""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

SIDE = 1024
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def flops_per_image(model: nn.Module, shape: tuple[int, ...]) -> float:
    """What convolutions and linear layers take, forward and backward, for one image; torch's own counter does not know groups."""
    found: list[float] = []

    def count(layer: nn.Module, _: object, out: Tensor) -> None:
        # Every element of the result is the sum of so many products.
        weight = layer.weight
        assert isinstance(weight, Tensor)
        found.append(2.0 * out[0].numel() * weight[0].numel())

    hooks = [one.register_forward_hook(count) for one in model.modules() if isinstance(one, nn.Conv2d | nn.Linear)]
    model(torch.zeros(2, *shape))
    for hook in hooks:
        hook.remove()
    # Backward is as much for the weights, and for the inputs, which the first layer's images need not.
    return 3 * sum(found) - found[0]


def multiplied(dtype: torch.dtype, seconds: float) -> float:
    """Floating-point operations a second of this rank."""
    left, right = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
    product: Tensor = left @ right
    dist.barrier()
    started_at, count = time.monotonic(), 0
    while time.monotonic() < started_at + seconds:
        torch.mm(left, right, out=product)
        count += 1
    return count * 2 * SIDE**3 / (time.monotonic() - started_at)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, dtype in DTYPES.items():
        together = torch.tensor(multiplied(dtype, float(sys.argv[1])), dtype=torch.float64)
        dist.all_reduce(together)
        found[name] = float(together)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
