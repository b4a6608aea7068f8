"""The same training as Hugging Face Accelerate's examples write it."""

import torch
from accelerate import Accelerator
from common import Stopwatch, work
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    wanted = work()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = wanted.build()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(wanted.dataset(), shuffle=True, **wanted.loader()))
    stopwatch, done = Stopwatch(wanted), False
    model.train()
    while not done:
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            done = stopwatch.step()
            if done:
                break
    if accelerator.is_main_process:
        stopwatch.show(accelerator.num_processes)
    accelerator.end_training()


main()
