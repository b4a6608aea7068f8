"""Who is DVC, who only has it in its command line, and who ends with its parent."""

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


# A child that asks to end with its parent: at once, or not before that has ended.
CHILD = """
import os, sys, time
from pipeline.process_tree import die_with
parent = os.getppid()
if sys.argv[1] == "early":
    die_with(parent)
print("there", flush=True)
while sys.argv[1] == "late" and os.getppid() == parent:
    time.sleep(0.01)
die_with(parent)
time.sleep(60)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize("asks", ["early", "late"])
def test_a_child_ends_with_its_parent_even_where_that_ended_before_it_asked(asks: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, "-c", CHILD, asks], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "there\n"
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
        assert not psutil.wait_procs([child], timeout=10)[1]
