"""What people write with the usual care: `torchrun --standalone --nproc-per-node=2 --max-restarts=3 bench/plain.py FOLDER`.

DDP, a DistributedSampler, latest.pt written in place and resumed from, MLflow told by rank 0. FOLDER holds a prepared experiment.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlflow
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pipeline import models
from pipeline.config import Config, params
from pipeline.data import store
from pipeline.training.schedule import Schedule


def dataset(folder: Path) -> TensorDataset:
    manifest, split = store.read_manifest(folder), store.open_split(folder, "train")
    mean, std = (torch.tensor(values)[None, :, None, None] for values in (manifest.mean, manifest.std))
    return TensorDataset((torch.from_numpy(split.images).float() / 255 - mean) / std, torch.from_numpy(split.labels))


def main() -> None:
    folder = Path(sys.argv[1])
    config = params.load(folder / "params.yaml")
    train, latest = config.train, folder / "latest.pt"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(config.seed)
    data = dataset(folder / "data" / "prepared")
    sampler = DistributedSampler(data, seed=config.seed, drop_last=True)
    loader = DataLoader(data, config.dist.batch_size_per_gpu, sampler=sampler, drop_last=True)
    total = len(loader) * train.epochs
    manifest = store.read_manifest(folder / "data" / "prepared")
    model = DistributedDataParallel(models.build(config.model.name, manifest.shape[0], manifest.shape[1], manifest.num_classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=train.learning_rate, momentum=train.momentum or 0, weight_decay=train.weight_decay)
    scheduler = LambdaLR(optimizer, Schedule(train.schedule, 1.0, train.warmup_epochs * len(loader), total).rate)
    parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
    step = resume(latest, parts)

    def log_and_save(loss: Tensor, step: int) -> None:
        mlflow.log_metric("train/loss", loss.item(), step=step)
        if step % config.checkpoint.every_steps == 0 or step == total:
            torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, latest)

    with tracking(config) if rank == 0 else nullcontext():
        for epoch in range(step // len(loader), train.epochs):
            sampler.set_epoch(epoch)
            for index, (images, labels) in enumerate(loader):
                if epoch * len(loader) + index < step:
                    continue
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                if rank == 0:
                    log_and_save(loss, step)
    dist.destroy_process_group()


def resume(latest: Path, parts: dict[str, Any]) -> int:
    if not latest.exists():
        return 0
    state = torch.load(latest, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    print(f"resuming at step {state['step']}")
    return state["step"]


def tracking(config: Config) -> mlflow.ActiveRun:
    mlflow.set_experiment(config.tracking.experiment)
    run = mlflow.start_run()
    mlflow.log_params(config.train.model_dump())
    return run


if __name__ == "__main__":
    main()
