"""Who is DVC, and who only has it in its command line."""

import subprocess
import sys

import psutil
import pytest

from pipeline.process_tree import is_dvc
from tests.kit.waiting import until

SLEEP = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bash", "-c", "exec -a /usr/bin/dvc sleep 60"], True),
        (["bash", "-c", f"exec -a /opt/python3.11 {sys.executable} /dev/stdin dvc"], False),
        (["bash", "-c", f"exec {sys.executable} DVC"], True),
        (["bash", "-c", f"exec {sys.executable} -m dvc repro"], True),
        (["bash", "-c", "exec -a screen tail -f /dev/null dvc"], False),
        (["tail", "-f", "dvc"], False),
    ],
)
def test_dvc_is_told_by_what_runs_and_not_by_what_is_named(tmp_path, words: list[str], expected: bool) -> None:
    for name in ("dvc", "dvc.py"):
        (tmp_path / name).write_text(SLEEP)
    words = [word.replace("DVC", str(tmp_path / "dvc")) for word in words]
    with subprocess.Popen(words, stdin=subprocess.PIPE, cwd=tmp_path, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(SLEEP)
        # Not left to `close`, which may come after the end of who reads it.
        process.stdin.flush()
        one = psutil.Process(process.pid)
        # Forked from here, then bash, then what is asked about.
        until(lambda: one.cmdline() != psutil.Process().cmdline() and one.cmdline()[:1] not in ([], ["bash"]))
        assert is_dvc(one) is expected
        process.kill()
