"""The README's pictures, `make pictures`: trains six experiments, and photographs what a person would look at."""

import subprocess
import sys
import tempfile
from pathlib import Path

import mlflow
from PIL import Image

from tests.kit import browser
from tests.kit.experiment import ROOT, Experiment, clean_environment
from tests.kit.servers import Server

PICTURES = ROOT / "docs" / "pictures"
SETTINGS = {"data": {"name": "fashion-mnist:12000"}, "model": {"name": "lenet"}, "checkpoint": {"every_steps": 200, "keep": 3}}
# A page is drawn wider than it is shown: MLflow's assistant takes the right side of it.
WIDE, SHOWN, TALL = 2300, 1708, 620
COLOURS = 128


def main() -> None:
    """Train, compare, photograph."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(Path(folder))
        for seed in (1, 2, 3):
            for rate in (0.05, 0.1):
                train = {"epochs": 5, "learning_rate": rate}
                dist = {"world_size": 2, "batch_size_per_gpu": 128, "lanes": 4}
                experiment.set(seed=seed, train=train, dist=dist, **SETTINGS)
                for command in ("prepare", "train", "evaluate"):
                    print(experiment.run(command), end="")
        # In its folder: the page names runs as one would type them there.
        subprocess.run(
            [sys.executable, "-m", "pipeline", "compare"], cwd=folder, env=clean_environment() | {"PYTHONPATH": str(ROOT)}, check=True
        )
        keep(browser.picture(f"file://{experiment.folder / 'compare.html'}", PICTURES / "compare.png", 1180, 1030))
        server = Server(experiment.folder).start()
        try:
            found = mlflow.MlflowClient(server.uri).get_experiment_by_name("lockstep")
            assert found is not None
            page = f"{server.uri}/#/experiments/{found.experiment_id}/runs?workflowType=machine_learning&viewStateShareKey=lockstep"
            # Twice: the first time fills the server's caches.
            for _ in range(2):
                browser.picture(page, PICTURES / "mlflow.png", WIDE, TALL, wait_ms=30000)
        finally:
            server.kill()
        keep(PICTURES / "mlflow.png", SHOWN)


def keep(path: Path, width: int | None = None) -> None:
    """Cut it and make it small: few colours are enough for text and lines."""
    with Image.open(path) as picture:
        cut = picture.convert("RGB").crop((0, 0, width or picture.width, picture.height))
    cut.quantize(COLOURS).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
