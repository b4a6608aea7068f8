"""A clone of this tree."""

import shutil
import subprocess
from pathlib import Path

from tests.kit.experiment import ROOT


def clone_of(folder: Path) -> Path:
    """This tree, with what is not committed yet, as a clone of its own."""
    # Without hard links: a clone may be given to another user.
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(folder)], check=True)
    listed = subprocess.run(["git", "ls-files", "-mo", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    commit(folder, "what is not committed yet")
    return folder


def commit(folder: Path, message: str) -> None:
    """Commit all of a clone, if there is anything."""
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run([*git, "add", "-A"], cwd=folder, check=True)
    subprocess.run([*git, "commit", "-qm", message, "--allow-empty"], cwd=folder, check=True)
