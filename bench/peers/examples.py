"""The loop of pytorch/examples' imagenet: DDP, a DataLoader with a DistributedSampler, and meters that read the loss at every step."""

import torch
import torch.distributed as dist
from common import Stopwatch, work
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Meter:
    """A running mean."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count


def percent_right(outputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Top-1 and top-5 accuracy of a batch."""
    with torch.no_grad():
        best = outputs.topk(5, 1).indices == labels[:, None]
        return [best[:, :k].any(1).float().mean() * 100 for k in (1, 5)]


def main() -> None:
    wanted = work()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(wanted.build())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    data = wanted.dataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, sampler=sampler, pin_memory=False, **wanted.loader())
    losses, top1, top5, stopwatch = Meter(), Meter(), Meter(), Stopwatch(wanted)
    epoch, done = 0, False
    model.train()
    while not done:
        sampler.set_epoch(epoch)
        epoch += 1
        for images, labels in loader:
            outputs = model(images)
            loss = criterion(outputs, labels)
            right = percent_right(outputs, labels)
            losses.update(loss.item(), len(labels))
            top1.update(right[0].item(), len(labels))
            top5.update(right[1].item(), len(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done = stopwatch.step()
            if done:
                break
    if dist.get_rank() == 0:
        stopwatch.show(dist.get_world_size())
    dist.destroy_process_group()


main()
