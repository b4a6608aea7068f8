"""The finished model as MLflow keeps it, in a file that is passed on unopened: to load a program is to run what it says."""

import platform
import runpy
import shutil
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml


class Program:
    """What MLflow calls a flavor: a `torch.export` program that takes uint8 images of one shape and gives logits."""

    def __init__(self, file: Path, shape: list[int], num_classes: int):
        self._file, self._shape, self._num_classes = file, shape, num_classes

    def save_model(self, path: str, mlflow_model: Any) -> None:
        """Fill the folder that `mlflow.pytorch.load_model` and `mlflow.pyfunc.load_model` read."""
        import numpy as np
        from mlflow import pyfunc
        from mlflow.models import ModelSignature
        from mlflow.types import Schema, TensorSpec

        folder = Path(path)
        (folder / "data").mkdir(parents=True)
        shutil.copyfile(self._file, folder / "data" / "model.pt2")
        needs = [f"{name}=={version(name)}" for name in ("mlflow", "torch")]
        (folder / "requirements.txt").write_text("\n".join(needs) + "\n")
        environment = {"python": platform.python_version(), "build_dependencies": ["pip"], "dependencies": ["-r requirements.txt"]}
        (folder / "python_env.yaml").write_text(yaml.safe_dump(environment))
        mlflow_model.signature = ModelSignature(
            inputs=Schema([TensorSpec(np.dtype(np.uint8), (-1, *self._shape))]),
            outputs=Schema([TensorSpec(np.dtype(np.float32), (-1, self._num_classes))]),
        )
        mlflow_model.add_flavor("pytorch", model_data="data", pytorch_version=_torch_version(), code=None)
        pyfunc.add_to_model(
            mlflow_model, loader_module="mlflow.pytorch", data="data", python_env="python_env.yaml", model_config={"device": None}
        )
        mlflow_model.save(str(folder / "MLmodel"))


def _torch_version() -> str:
    """With the build, as 2.14.1+cu130; to import torch would take this process two seconds."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"]
