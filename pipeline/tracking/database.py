"""MLflow's local database: made whole or not at all, and opened by one process at a time."""

import contextlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pipeline.files import locked


@contextmanager
def opening(uri: str) -> Generator[None]:
    """One process at a time opens a local database: two that create or migrate it at once break it."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    path = Path(uri.removeprefix("sqlite:///"))
    with locked(path.with_name(path.name + ".lock")):
        if not path.exists():
            _create(path)
        yield


def _create(path: Path) -> None:
    """A new database, whole or not at all: MLflow cannot mend one whose creation was killed."""
    import mlflow

    scratch = path.with_name(f".{path.name}.new")
    for left in (scratch, path.with_name(f"{scratch.name}-journal")):
        left.unlink(missing_ok=True)
    mlflow.MlflowClient(f"sqlite:///{scratch}").search_experiments(max_results=1)
    with contextlib.suppress(FileExistsError):
        # Unless a server has made it meanwhile.
        os.link(scratch, path)
    scratch.unlink()
