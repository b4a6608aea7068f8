"""What LeNet learns on Fashion-MNIST in equal epochs, and the seconds to 90.0 % of the test images, in turn with what people write."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from bench.against import ROOT, forget, torchrun, unpack

SEEDS = (1, 2, 3, 4, 5)
EPOCHS = 5
GOAL = 0.9
# What tutorials on several GPUs set, and how long they are given.
TUTORIAL = {"learning_rate": 0.2, "momentum": 0.0, "weight_decay": 0.0, "epochs": 60, "until": GOAL}
# That of pytorch/examples' loop here, for as many epochs as the product as it is shipped.
EXAMPLES = {"learning_rate": 0.05, "momentum": 0.9, "weight_decay": 5e-4, "epochs": EPOCHS, "until": 2.0}
# The product's settings where they are not params.yaml's.
QUICK = {"epochs": 5, "learning_rate": 0.1}


def product(scratch: Path, seed: int, train: dict[str, Any]) -> tuple[float, float]:
    """The test accuracy, and the seconds of the whole `train`, from its start until MLflow has everything."""
    folder = scratch / f"product-{seed}"
    folder.mkdir(exist_ok=True)
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["data"]["root"], values["seed"] = str(scratch / "FashionMNIST" / "raw"), seed
    values["train"] |= train
    (folder / "params.yaml").write_text(yaml.safe_dump(values))
    forget(folder)
    seconds: dict[str, float] = {}
    for command in ("prepare", "train", "evaluate"):
        started_at = time.monotonic()
        words = [sys.executable, "-m", "pipeline", command, "--params", str(folder / "params.yaml")]
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
        seconds[command] = time.monotonic() - started_at
    return float(json.loads((folder / "metrics" / "eval.json").read_text())["accuracy"]), seconds["train"]


def loop(scratch: Path, seed: int, recipe: dict[str, float]) -> tuple[list[float], float]:
    """The test accuracy after every epoch, and the seconds of the whole script but for its evaluations."""
    started_at = time.monotonic()
    said = torchrun(ROOT / "bench" / "peers" / "recipe.py", json.dumps(recipe | {"root": str(scratch), "seed": seed}))
    elapsed_seconds = time.monotonic() - started_at
    found = json.loads(next(line for line in said.splitlines() if line.startswith('{"accuracies')))
    return found["accuracies"], elapsed_seconds - found["evaluating_seconds"]


def report(scratch: Path) -> dict[str, dict[str, list[float]]]:
    """Every figure over the seeds, by what was asked."""
    unpack(scratch)
    ours, theirs = f"the product, {EPOCHS} epochs", f"pytorch/examples' recipe, {EPOCHS} epochs"
    equal: dict[str, list[float]] = {ours: [], theirs: []}
    quick = f"the product, {QUICK['epochs']} epochs"
    accuracies: dict[str, list[float]] = {quick: [], "a tutorial's loop, when it ends": []}
    seconds: dict[str, list[float]] = {"the product": [], "a tutorial's loop": [], "a tutorial's loop / the product": []}
    epochs: dict[str, list[float]] = {"a tutorial's loop": []}
    for seed in SEEDS:
        equal[ours].append(product(scratch, seed, {"epochs": EPOCHS})[0])
        equal[theirs].append(loop(scratch, seed, EXAMPLES)[0][-1])
        accuracy, fast = product(scratch, seed, QUICK)
        reached, slow = loop(scratch, seed, TUTORIAL)
        for values, one in zip(accuracies.values(), (accuracy, reached[-1]), strict=True):
            values.append(one)
        for values, one in zip(seconds.values(), (fast, slow, slow / fast), strict=True):
            values.append(one)
        epochs["a tutorial's loop"].append(len(reached))
        print(
            f"  seed {seed}: {accuracy:.4f}, {fast:.1f} s; {len(reached)} epochs, {reached[-1]:.4f}, {slow:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    return {
        "test accuracy after equal epochs": equal,
        f"seconds to {GOAL:.1%} of the test images": seconds,
        "test accuracy then": accuracies,
        "epochs": epochs,
    }
