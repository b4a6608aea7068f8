"""What torch 2.14 calls otherwise: `bench/gpu.py` puts this before all else on a machine that has an older torch and can have no other."""

import torch.distributed as dist
from torch.nn import parallel


class OlderDistributedDataParallel(parallel.DistributedDataParallel):
    """The name that `broadcast_buffers` has since 2.13."""

    def __init__(self, *arguments, forward_sync_buffers=True, **options):
        super().__init__(*arguments, broadcast_buffers=forward_sync_buffers, **options)


dist.all_gather_single = dist.all_gather_into_tensor
parallel.DistributedDataParallel = OlderDistributedDataParallel
