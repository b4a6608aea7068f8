"""What people write by hand: a DDP loop over tensors in memory, and nothing else. `torchrun bench/bare.py JOB`."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from pipeline import job as jobs
from pipeline import models
from pipeline.data import store

WARM_STEPS = 20


def main() -> None:
    job = jobs.read(Path(sys.argv[1]))
    config, manifest = job.config, store.read_manifest(job.prepared)
    torch.set_num_threads(config.dist.threads_per_rank)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    split = store.open_split(job.prepared, "train")
    images, labels = torch.from_numpy(split.images), torch.from_numpy(split.labels)
    mean, std = (torch.tensor(values)[None, :, None, None] for values in (manifest.mean, manifest.std))
    model = models.build(config.model.name, manifest.shape[0], manifest.shape[1], manifest.num_classes).to(
        memory_format=torch.channels_last
    )
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.train.learning_rate, momentum=0.9, weight_decay=5e-4, fused=True)
    batch, done, started_at = config.dist.batch_size_per_gpu, 0, 0.0
    per_epoch = len(labels) // (batch * size)
    for epoch in range(config.train.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for step in range(per_epoch):
            if done == WARM_STEPS:
                started_at = time.monotonic()
            rows = order[(step * size + rank) * batch :][:batch]
            inputs = (images[rows].float() / 255 - mean) / std
            with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"):
                logits = ddp(inputs.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits.float(), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
    if rank == 0:
        print((done - WARM_STEPS) * batch * size / (time.monotonic() - started_at))
    dist.destroy_process_group()


main()
