"""What happens to a training when nobody reads what it prints, or its terminal closes: nothing but what SIGHUP asks for."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Callable

import pytest

from tests.kit.experiment import LONGER, ROOT, Experiment, clean_environment
from tests.kit.trainings import mlflow_runs, same_figures, status, wait_for_step
from tests.kit.waiting import until
from tests.unit.test_output import fill

pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]


def start(experiment: Experiment, output: int, **options: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pipeline", "train", "--params", str(experiment.params)]
    environment = clean_environment() | {"TERM": "xterm"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=output, stdout=output, stderr=output, text=True, **options)  # type: ignore[call-overload]


def ends_bit_equal(process: "subprocess.Popen[str]", experiment: Experiment, baseline: Experiment) -> None:
    assert process.wait(timeout=200) == 0
    assert (status(experiment)["outcome"], status(experiment)["exit_code"]) == ("done", 0)
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FINISHED"]
    same_figures(experiment, baseline)


@pytest.mark.parametrize("how", ["gone", "full"])
@pytest.mark.fault(30, "the reader of stdout and stderr goes in mid-run; a pipe that is full from the beginning is never read")
def test_a_reader_that_goes_or_never_reads_changes_nothing(
    how: str, baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    reader, writer = os.pipe()
    if how == "full":
        fill(writer)
    process = start(experiment, writer)
    os.close(writer)
    wait_for_step(experiment, 60, process)
    if how == "gone":
        os.close(reader)
    ends_bit_equal(process, experiment, baseline)
    record_property("happened", f"{how}: exit 0, bit-equal, status.json done, MLflow FINISHED")


@pytest.mark.parametrize("hangup", [True, False], ids=["SIGHUP", "no SIGHUP"])
@pytest.mark.fault(30, "the terminal closes in mid-run, with SIGHUP, and without it as under setsid")
def test_a_terminal_that_closes_asks_for_a_stop_or_for_nothing(
    hangup: bool, baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    master, terminal = pty.openpty()

    def control() -> None:
        # The kernel sends SIGHUP to the leader of the session that a terminal controls.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if hangup:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = start(experiment, terminal, start_new_session=True, preexec_fn=control)
    os.close(terminal)
    seen = b""
    while b"step" not in seen:
        # The live line: it is a terminal to them.
        seen += os.read(master, 4096)
    wait_for_step(experiment, 60, process)
    os.close(master)
    if not hangup:
        ends_bit_equal(process, experiment, baseline)
        record_property("happened", "without SIGHUP: exit 0, bit-equal")
        return
    assert process.wait(timeout=100) == 75
    assert (status(experiment)["outcome"], status(experiment)["exit_code"]) == ("stopped", 75)
    assert [run.info.status for run in mlflow_runs(experiment)] == ["KILLED"]
    assert experiment.journal("ended")[-1]["outcome"] == "stopped"
    experiment.run("train")
    same_figures(experiment, baseline)
    record_property("happened", "with SIGHUP: exit 75, status.json stopped, MLflow KILLED; going on ends bit-equal")


@pytest.mark.fault(30, "SIGHUP, SIGTERM and SIGINT while a finished run is published and MLflow takes the rest")
def test_a_signal_after_the_last_step_does_not_change_how_the_run_ended(experiment: Experiment) -> None:
    experiment.set(model__name="mlp").run("prepare")
    process = experiment.start("train")

    def finished() -> bool:
        return bool(list(experiment.folder.glob("runs/*/journal.jsonl"))) and bool(experiment.journal("attempt-ended"))

    until(finished, process, every_seconds=0.005)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert status(experiment)["outcome"] == "done"
    experiment.run("sync")
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FINISHED"]
