"""Checks of the programs that runs use: git and Docker Compose."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from pipeline.doctor.finding import Finding
from pipeline.tracking.receipt import CODE, git_state

# The first version that knows `attach: false`.
COMPOSE = (2, 20)


def git(root: Path) -> list[Finding]:
    """Whether git trusts the folder, and whether receipts will name a commit."""
    findings: list[Finding] = []
    for folder in dict.fromkeys((root, CODE)):
        _, _, errors = _run("git", "-C", str(folder), "rev-parse", "HEAD")
        fix = re.search(r"git config --global --add safe\.directory .+", errors)
        if fix:
            findings.append(Finding("wrong", f"git does not trust {folder}, which belongs to another user", fix[0]))
    commit = git_state()["commit"]
    if commit:
        return [*findings, Finding("ok", f"receipts will name commit {commit[:12]}")]
    return findings or [Finding("note", "receipts will name no commit, as neither git nor LOCKSTEP_COMMIT gives one")]


def compose(needed: tuple[int, int] = COMPOSE) -> Finding:
    """Whether Docker Compose is new enough for our files."""
    if shutil.which("docker") is None:
        return Finding("note", "no docker here; only runs in containers need it")
    code, output, _ = _run("docker", "compose", "version", "--short")
    version = re.match(r"v?(\d+)\.(\d+)", output)
    least = ".".join(map(str, needed))
    fix = "install it from https://docs.docker.com/compose/install/linux"
    if code or version is None:
        return Finding("wrong", f"docker has no Compose, and our files need {least}", fix)
    if (int(version[1]), int(version[2])) < needed:
        return Finding("wrong", f"Docker Compose {version[0]} is older than {least}, which our files need", fix)
    return Finding("ok", f"Docker Compose {version[0]}")


def _run(*command: str) -> tuple[int, str, str]:
    """Return a program's exit code, output and errors; the exit code is 127 if there is no such program."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3, env=os.environ | {"LC_ALL": "C"})
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    except OSError:
        return 127, "", ""
    return done.returncode, done.stdout, done.stderr
