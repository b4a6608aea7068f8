"""Stop requests as engines make them: to every process at once, more than once, with little time."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.kit.experiment import LONGER, ROOT, Experiment, clean_environment
from tests.kit.trainings import mlflow_runs, ranks_of, same_figures, status, suspended, wait_for_step
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]
# So seldom that only a stop saves.
SELDOM = LONGER | {"checkpoint__every_steps": 1000}


def job_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Every process of a job but the mirror, which ignores signals anyway."""
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def signal_all(processes: list[psutil.Process], number: int) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


@pytest.mark.parametrize("order", ["launcher first", "ranks first"])
@pytest.mark.fault(29, "SIGTERM, SIGHUP and SIGTERM to every process of a job within 3 s, the launcher first or last")
def test_a_signal_to_every_process_is_one_request(baseline: Experiment, experiment: Experiment, order: str, record_property: Note) -> None:
    experiment.set(**SELDOM).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 30, process)
    everyone = job_of(process)
    with suspended(process):
        # systemd sends the second one too, with SendSIGHUP=yes.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            signal_all(everyone if order == "launcher first" else everyone[::-1], number)
            time.sleep(0.5)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    ended = status(experiment)
    assert (ended["outcome"], ended["step"]) == ("stopped", int(ended["checkpoint"][-20:-12])), "the step it stopped at is saved"
    assert ended["step"] >= 30
    experiment.set(**LONGER).run("train")
    same_figures(experiment, baseline)
    record_property("happened", f"{len(everyone)} processes signalled three times: 75 at step {ended['step']}, saved; bit-equal")


@pytest.mark.fault(29, "SIGTERM to the launcher every 2 ms for 2.9 s: also between the ranks' end and its own")
def test_a_storm_of_signals_that_outlasts_the_ranks_is_one_request(experiment: Experiment) -> None:
    experiment.set(**SELDOM).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 30, process)
    until_when = time.monotonic() + 2.9
    while time.monotonic() < until_when and process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.002)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    ended = status(experiment)
    assert (ended["outcome"], ended["step"]) == ("stopped", int(ended["checkpoint"][-20:-12]))
    assert "MLflow does not have all of it yet" not in said
    assert [run.info.status for run in mlflow_runs(experiment)] == ["KILLED"]


@pytest.mark.fault(29, "SIGTERM to `lead` and to all below it at once")
def test_a_signal_to_lead_and_all_below_it_is_one_request(experiment: Experiment) -> None:
    experiment.set(**SELDOM).run("prepare")
    words = [sys.executable, "-m", "pipeline", "train", "--params", str(experiment.params)]
    process = experiment.start("lead", "--port", "29411", *words)
    wait_for_step(experiment, 30, process)
    with suspended(process):
        signal_all(job_of(process), signal.SIGTERM)
        time.sleep(0.5)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    ended = status(experiment)
    assert (ended["outcome"], ended["step"]) == ("stopped", int(ended["checkpoint"][-20:-12]))


@pytest.mark.fault(35, "a stop in a validation, with a grace of 4 s")
def test_a_stop_in_a_long_validation_is_saved_and_the_validation_made_up_for(
    baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    # On one rank all three chunks are its own; a stop is known one chunk after it was asked for.
    experiment.set(**SELDOM, dist__grace_seconds=4, dist__world_size=1, dist__batch_size_per_gpu=96).run("prepare")
    words = [sys.executable, "-m", "tests.kit.faulty", "train", "--params", str(experiment.params)]
    environment = clean_environment() | {"FAULT": "validation:1.2:0"}
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # The last figure before the first validation.
    wait_for_step(experiment, 56, process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert status(experiment)["step"] == 56
    assert status(experiment)["checkpoint"].endswith("step-00000056.safetensors")
    assert not [line for line in experiment.journal("metrics") if "validation/loss" in line["values"]]
    experiment.set(**LONGER).run("train")
    same_figures(experiment, baseline)
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FINISHED"]
    record_property("happened", "75 at the end of the epoch, saved before the grace was over; validated when it went on; bit-equal")


@pytest.mark.parametrize("seconds", [3, 10])
@pytest.mark.fault(35, "SIGTERM to everything, SIGKILL to what is left 3 and 10 s later")
def test_an_engine_that_kills_soon_costs_no_checkpoint(baseline: Experiment, experiment: Experiment, seconds: int) -> None:
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 50, process)
    everyone = job_of(process)
    signal_all(everyone, signal.SIGTERM)
    _, left = psutil.wait_procs(everyone, timeout=seconds)
    signal_all(left, signal.SIGKILL)
    process.communicate(timeout=30)
    kept = [int(path.stem[-8:]) for path in (experiment.run_folder / "checkpoints").glob("step-*.safetensors")]
    assert max(kept) >= 40
    experiment.run("train")
    same_figures(experiment, baseline)


def test_a_plain_torchrun_takes_the_same_ranks_to_the_same_end(baseline: Experiment, experiment: Experiment) -> None:
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 30, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    (job,) = experiment.run_folder.glob("logs/*/job.json")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    words = [*torchrun, "-m", "pipeline.training.train_rank", str(job)]
    plain = subprocess.Popen(words, cwd=ROOT, env=clean_environment(), stderr=subprocess.PIPE, text=True)
    try:
        # It starts lost ranks again by itself.
        wait_for_step(experiment, status(experiment)["step"] + 10, plain)
        (lost,) = [one for one in psutil.Process(plain.pid).children() if one.environ().get("RANK") == "1"]
        lost.kill()
        _, said = plain.communicate(timeout=200)
    finally:
        # Its ranks end with it.
        plain.kill()
    assert plain.returncode == 0, said
    # Of the one that was killed, or of the other, which lost it.
    assert "failed (exitcode: " in said
    assert experiment.journal("finished")
    experiment.run("train")
    same_figures(experiment, baseline)


def test_a_killed_agent_leaves_ranks_that_save(baseline: Experiment, experiment: Experiment) -> None:
    experiment.set(**SELDOM).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 30, process)
    agent = psutil.Process(ranks_of(process)[0].pid).parent()
    assert agent is not None
    with suspended(process):
        os.kill(agent.pid, signal.SIGKILL)
        until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert status(experiment)["step"] == int(status(experiment)["checkpoint"][-20:-12])
    experiment.set(**LONGER).run("train")
    same_figures(experiment, baseline)


def child_of(pid: int, module: str) -> psutil.Process:
    """The child that runs a module, as soon as it is there; others come and go."""

    def found() -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            return next((one for one in psutil.Process(pid).children() if module in one.cmdline()), None)
        return None

    return until(found, every_seconds=0.005)


@pytest.mark.parametrize("whom", ["launcher", "agent", "agent, then launcher"])
@pytest.mark.fault(3, "SIGTERM to the launcher, to torchrun's agent, to both while torchrun is imported")
def test_a_stop_before_torchrun_can_answer_is_a_stop(experiment: Experiment, whom: str) -> None:
    experiment.set(**SELDOM).run("prepare")
    process = experiment.start("train")
    agent = child_of(process.pid, "pipeline.launch.agent")
    signal_all({"launcher": [], "agent": [agent]}.get(whom, [agent]), signal.SIGTERM)
    if whom != "agent":
        process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert status(experiment)["outcome"] == "stopped"


@pytest.mark.fault(3, "SIGTERM to torchrun's agent alone while it starts its ranks")
def test_a_stop_while_torchrun_starts_its_ranks_is_a_stop(experiment: Experiment) -> None:
    experiment.set(**SELDOM).run("prepare")
    process = experiment.start("train")
    agent = child_of(process.pid, "pipeline.launch.agent")
    server = child_of(agent.pid, "pipeline.forkserver")
    server.suspend()
    # torch has set its own handler, and waits for the first rank.
    caught = 1 << (signal.SIGTERM - 1)
    until(lambda: int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{agent.pid}/status").read_text())[1], 16) & caught, process)
    time.sleep(0.5)
    agent.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert not server.is_running()


@pytest.mark.fault(38, "SIGTERM to one rank alone; its last checkpoint is on the disk later than the grace and its alarm after that")
def test_a_rank_that_was_asked_alone_has_all_the_time_it_takes_to_save(experiment: Experiment, record_property: Note) -> None:
    # The newest one, which takes 15 s to write, is waited for first; the alarm would come after 18 s.
    experiment.set(**LONGER, dist__grace_seconds=3).run("prepare")
    words = [sys.executable, "-m", "tests.kit.faulty", "train", "--params", str(experiment.params)]
    environment = clean_environment() | {"FAULT": "disk:0:0"}
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_step(experiment, 20, process)
    asked_at = time.monotonic()
    ranks_of(process)[0].terminate()
    said, _ = process.communicate(timeout=90)
    seconds = time.monotonic() - asked_at
    assert process.returncode == 75, said
    assert seconds > 18
    ended = status(experiment)
    assert (ended["outcome"], ended["step"]) == ("stopped", int(ended["checkpoint"][-20:-12]))
    record_property("happened", f"75 at step {ended['step']}, saved {seconds:.1f} s after the signal")
