"""What becomes of whole stages and commands: interrupted, started twice, on other ranks, with other settings, under a wrong clock."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline.data.store import open_split
from tests.kit.driver import driver
from tests.kit.experiment import LONGER, ROOT, Experiment, clean_environment
from tests.kit.trainings import same_figures, status, suspended, wait_for_step, weights
from tests.kit.waiting import child_cpu_seconds

Note = Callable[[str, object], None]
# The system's clock, and only it, ahead by as many seconds as a file says.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long ahead(void) {
  char text[32] = {0};
  int file = open(getenv("CLOCK_AHEAD"), O_RDONLY);
  if (file >= 0) { if (read(file, text, 31) < 0) text[0] = 0; close(file); }
  return atol(text);
}
int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, now);
  if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) now->tv_sec += ahead();
  return result;
}
int gettimeofday(struct timeval *now, void *zone) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *now) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now) *now = precise.tv_sec;
  return precise.tv_sec;
}
"""
NATIVE = LONGER | {"dist__reduction": "native", "dist__lanes": None}


@pytest.mark.slow
@pytest.mark.fault(19, "two jobs at once on one machine, one of them on three ranks")
def test_two_jobs_at_once_do_not_join_each_other(baseline: Experiment, tmp_path: Path, record_property: Note) -> None:
    jobs = []
    for number in (2, 3):
        folder = tmp_path / str(number)
        folder.mkdir()
        jobs.append(Experiment(folder).set(**LONGER, dist__world_size=number, dist__batch_size_per_gpu=96 // number))
        jobs[-1].run("prepare")
    started = [job.start("train") for job in jobs]
    for process in started:
        said, _ = process.communicate(timeout=280)
        assert process.returncode == 0, said
    for job in jobs:
        same_figures(job, baseline)
    record_property("happened", "both done, both with the bits of the one left alone")


@pytest.mark.slow
@pytest.mark.fault(20, "a second start from another pid and host namespace, as from another container; then a stale lock")
def test_a_second_run_from_another_container_is_refused_and_a_stale_lock_is_none(
    baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can open namespaces")
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 20, process)
    train = f"hostname other && exec {sys.executable} -m pipeline train --params {experiment.params}"
    words = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", train]
    with suspended(process):
        before, started_at = child_cpu_seconds(), time.monotonic()
        second = subprocess.run(words, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
        seconds = child_cpu_seconds() - before
        assert time.monotonic() - started_at < 10, "it waited"
    assert second.returncode == 4, second.stderr
    assert re.search(rf"running already, on {os.uname().nodename} as process {process.pid} since \d{{4}}-", second.stderr)
    assert seconds < 2
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.send_signal(signal.SIGKILL)
    process.communicate()
    assert (experiment.run_folder / "lock").read_text()
    experiment.run("train")
    same_figures(experiment, baseline)
    record_property(
        "happened", f"refused after {seconds:.1f} s of work with host, pid and start; the lock of the killed one is taken over, bit-equal"
    )


@pytest.mark.slow
@pytest.mark.fault(21, "native: stopped on 2 ranks, resumed by hand on 3; ordered: see the training stopped on 2, 3, 1 and 2 ranks")
def test_a_native_run_resumed_on_other_ranks_says_what_is_not_equal(experiment: Experiment, record_property: Note) -> None:
    experiment.set(**NATIVE).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 60, process)
    process.terminate()
    process.communicate(timeout=60)
    first, stopped_at = experiment.run_folder, status(experiment)["step"]
    experiment.set(**NATIVE, dist__world_size=3, dist__batch_size_per_gpu=32)
    both = [experiment.start("train", "--resume", str(first)) for _ in range(2)]
    refused, said = sorted((one.communicate(timeout=280)[0] for one in both), key=len)
    assert sorted(one.returncode for one in both) == [0, 4]
    assert "running already" in refused
    assert "dist.world_size 2 -> 3: the same samples in the same order, none twice and none left out" in said
    assert "the bits are those of neither" in said
    (second,) = (path.parent for path in first.parent.glob("*/receipt.json"))
    assert second != first
    lines = [json.loads(line) for line in (second / "journal.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "train/loss" in line.get("values", {})]
    # Of 224 steps every second one is logged: none twice, none left out, no gap where the one ended and the other began.
    assert steps == list(range(2, 225, 2))
    assert steps[0] < stopped_at < steps[-1]
    assert len(experiment.json("models/receipt.json")["epochs"]) == 4
    record_property("happened", f"went on at step {stopped_at}, every step once, four epochs; said that the bits are those of neither")


@pytest.mark.slow
@pytest.mark.fault(22, "another learning rate; the checkpoint of the first asked for by hand")
def test_another_experiment_has_another_run_and_no_checkpoint_of_this_one(experiment: Experiment, record_property: Note) -> None:
    experiment.set(model__name="mlp").run("prepare")
    experiment.run("train")
    first, bits = experiment.run_folder, weights(experiment)
    experiment.set(model__name="mlp", train__learning_rate=0.01)
    said = experiment.run("train", "--resume", str(first), expect=2)
    assert "is another experiment (train.learning_rate: 0.05 there, 0.01 here)" in said
    assert "no folder of a run" in experiment.run("train", "--resume", str(experiment.folder), expect=2)
    assert "going on from" not in experiment.run("train")
    assert len(list((experiment.folder / "runs").glob("*/receipt.json"))) == 2
    assert weights(experiment) != bits
    record_property("happened", "a run folder of its own; by hand refused with exit 2: train.learning_rate: 0.05 there, 0.01 here")


@pytest.mark.slow
@pytest.mark.fault(26, "the clock an hour ahead, and then an hour back, in mid-training")
def test_a_jumping_clock_changes_nothing(baseline: Experiment, experiment: Experiment, record_property: Note) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (experiment.folder / "clock.c").write_text(CLOCK)
    library, ahead = experiment.folder / "clock.so", experiment.folder / "ahead"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, experiment.folder / "clock.c", "-ldl"], check=True)
    ahead.write_text("0")
    experiment.set(**LONGER, dist__timeout_seconds=20).run("prepare")
    clock = {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(ahead)}
    started_at = time.monotonic()
    process = experiment.start("train", **clock)
    for step, jump in ((60, "3600"), (120, "-3600")):
        wait_for_step(experiment, step, process)
        ahead.write_text(jump)
    said, _ = process.communicate(timeout=200)
    waited_seconds = time.monotonic() - started_at
    assert process.returncode == 0, said
    assert "starting again" not in said
    ats = [line["at"] for line in experiment.journal("metrics")]
    assert max(ats) - min(ats) > 3_600_000, "the clock did not jump"
    # The ranks ran for a few seconds at least, and within what was waited for here.
    assert 2 < experiment.json("models/receipt.json")["elapsed_seconds"] < waited_seconds
    same_figures(experiment, baseline)
    record_property("happened", "no timeout, no restart, bit-equal; the receipt's seconds are the true ones")


@pytest.mark.slow
@pytest.mark.fault(12, "the training images cut short while ranks have them mapped")
def test_data_cut_short_under_running_ranks_are_named(experiment: Experiment, record_property: Note) -> None:
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 10, process)
    images = open_split(experiment.folder / "data" / "prepared", "train").images
    path = experiment.folder / "data" / "prepared" / "train-images.npy"
    os.truncate(path, images.nbytes // 4)
    said, _ = process.communicate(timeout=120)
    # The ranks die by SIGBUS, twice in the same place; the next start looks at the data and names the file.
    assert process.returncode == 6, said
    assert "SIGBUS" in said
    said = experiment.run("train", expect=3)
    assert f"{path}: expected SHA-256" in said
    record_property("happened", "SIGBUS named, exit 6; the next start exits with 3 and names the file and both digests")


@pytest.mark.fault(24, "a driver that can only do CUDA 12.4 (a library in libcuda's place says so)")
def test_a_driver_too_old_is_refused_with_both_versions(experiment: Experiment, tmp_path: Path, record_property: Note) -> None:
    experiment.run("prepare")
    said = experiment.run("train", expect=4, **driver(tmp_path / "driver", DRIVER=12040))
    assert "can do CUDA 12.4 and torch needs 13.0; update the driver, or set CUDA_VISIBLE_DEVICES= for CPUs" in said
    record_property("happened", "exit 4 with both versions and both cures")
