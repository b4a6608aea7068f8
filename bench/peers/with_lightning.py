"""The same training as a LightningModule; of its Trainer's defaults only the progress bar is off."""

import sys
import tempfile
from typing import Any

import pytorch_lightning as lightning
import torch
from common import Stopwatch, Work, work
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self, wanted: Work):
        super().__init__()
        torch.manual_seed(1)
        self.model, self.stopwatch = wanted.build(), Stopwatch(wanted)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.stopwatch.step() and self.global_rank == 0:
            self.stopwatch.show(self.trainer.world_size)
            sys.stdout.flush()


def main() -> None:
    wanted = work()
    loader = DataLoader(wanted.dataset(), shuffle=True, **wanted.loader())
    with tempfile.TemporaryDirectory() as scratch:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_steps=wanted.warm + wanted.steps,
            enable_progress_bar=False,
            default_root_dir=scratch,
        )
        trainer.fit(Classifier(wanted), loader)


main()
