"""Virtual environments that hold other people's engines, which `make engines` makes."""

import subprocess
from pathlib import Path

import pytest

from tests.kit.experiment import LONGER, ROOT

# Of the long experiment, on as many machines as there are.
AUTO = LONGER | {"dist__world_size": "auto", "dist__batch_size_per_gpu": None, "dist__global_batch": 96}
# So seldom that only a stop saves.
SELDOM = AUTO | {"checkpoint__every_steps": 100_000}


def engine(name: str, reason: str) -> Path:
    """The folder with an engine's programs; skips what asks for it where there is none."""
    programs = ROOT / f".venv-{name}" / "bin"
    if not (programs / "python").exists():
        pytest.skip(reason)
    return programs


def parse(programs: Path, code: str, file: Path) -> subprocess.CompletedProcess[str]:
    """Let an engine's own code read a file."""
    return subprocess.run([str(programs / "python"), "-c", code, str(file)], capture_output=True, text=True)
