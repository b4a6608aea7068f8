"""The finished model as MLflow keeps it, in a file that is passed on unopened: to load a program is to run what it says."""

import json
import platform
import runpy
import shutil
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from pipeline import pictures

# In the model's folder; names of their own, as MLflow imports them beside whatever else there is.
SERVED, PICTURES = "lockstep_served_model", "lockstep_pictures"


class Program:
    """What MLflow calls a flavor: a `torch.export` program that takes uint8 images of one shape and gives logits."""

    def __init__(self, file: Path, line: dict[str, Any]):
        self._file, self._shape = file, line["shape"]
        # The journal of an earlier version has no names.
        self._class_names: list[str] = line.get("classes") or [str(number) for number in range(line.get("num_classes", 0))]
        self._precision: str = line.get("precision", "fp32")

    def save_model(self, path: str, mlflow_model: Any) -> None:
        """Fill the folder: `mlflow.pytorch.load_model` reads logits from it, `mlflow.pyfunc.load_model` class names and probabilities."""
        from mlflow import pyfunc
        from mlflow.models import ModelSignature
        from mlflow.types import ColSpec, Schema

        folder = Path(path)
        (folder / "data").mkdir(parents=True)
        shutil.copyfile(self._file, folder / "data" / "model.pt2")
        facts = {"classes": self._class_names, "shape": self._shape, "precision": self._precision}
        (folder / "data" / "facts.json").write_text(json.dumps(facts))
        (folder / "code").mkdir()
        shutil.copyfile(pictures.__file__, folder / "code" / f"{PICTURES}.py")
        served = Path(__file__).with_name("served_model.py").read_text().replace(pictures.__name__, PICTURES)
        (folder / "code" / f"{SERVED}.py").write_text(served)
        needs = [f"{name}=={version(name)}" for name in ("mlflow", "torch", "numpy", "pandas", "pillow")]
        (folder / "requirements.txt").write_text("\n".join(needs) + "\n")
        environment = {"python": platform.python_version(), "build_dependencies": ["pip"], "dependencies": ["-r requirements.txt"]}
        (folder / "python_env.yaml").write_text(yaml.safe_dump(environment))
        # Without inputs: MLflow's schema would take arrays or files, and not both.
        probabilities = [ColSpec("float", name) for name in ("probability", *(f"p({name})" for name in self._class_names))]
        mlflow_model.signature = ModelSignature(outputs=Schema([ColSpec("string", "class"), *probabilities]))
        mlflow_model.add_flavor("pytorch", model_data="data", pytorch_version=_torch_version(), code=None)
        pyfunc.add_to_model(mlflow_model, loader_module=SERVED, code="code", data="data", python_env="python_env.yaml")
        mlflow_model.save(str(folder / "MLmodel"))


def _torch_version() -> str:
    """With the build, as 2.14.1+cu130; to import torch would take this process two seconds."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"]
