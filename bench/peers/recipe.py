"""LeNet as tutorials train it: DDP, images one by one, fp32, and the test accuracy after each epoch: `torchrun recipe.py '{"seed": 1}'`."""

import json
import sys
import time

import torch
import torch.distributed as dist
from common import Work
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def accuracy(model: nn.Module, wanted: Work) -> float:
    """The share of the test images that the model gets right."""
    right = 0
    model.eval()
    with torch.no_grad():
        for images, labels in DataLoader(wanted.dataset(train=False), batch_size=500):
            right += int((model(images).argmax(1) == labels).sum())
    model.train()
    return right / 10000


def main() -> None:
    wanted = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(wanted["seed"])
    work = Work(wanted["root"], "lenet", 28, 128, 0, 0, 0)
    model = DistributedDataParallel(work.build())
    optimizer = torch.optim.SGD(model.parameters(), wanted["learning_rate"], wanted["momentum"], weight_decay=wanted["weight_decay"])
    data = work.dataset()
    sampler = DistributedSampler(data, seed=wanted["seed"])
    loader = DataLoader(data, sampler=sampler, **work.loader())
    found, evaluating = [], 0.0
    model.train()
    for epoch in range(wanted["epochs"]):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        started_at = time.monotonic()
        # All ranks go by what rank 0 has found.
        of_rank_0 = torch.tensor(accuracy(model.module, work), dtype=torch.float64)
        dist.broadcast(of_rank_0, 0)
        found.append(float(of_rank_0))
        evaluating += time.monotonic() - started_at
        if found[-1] >= wanted["until"]:
            break
    if dist.get_rank() == 0:
        print(json.dumps({"accuracies": found, "evaluating_seconds": evaluating}))
    dist.destroy_process_group()


main()
