"""What an ending is judged to be, from the journal and from what the launcher saw; and its words."""

import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config, DataError, MachineError, PeerError
from pipeline.job import Job
from pipeline.launch import outcome
from pipeline.launch.failures import Failure, LaunchResult
from pipeline.launch.outcome import broken, describe, judge, unpublished
from pipeline.runs.status import Outcome

CONFIG = Config.model_validate({"dist": {"batch_size_per_gpu": 48, "accumulation": 2, "lanes": 8}})
STARTED = {"kind": "started", "stage": "train", "tags": {}}
FAILED = Failure(1, 1, "ValueError: no", 0, 7)
DONE = Outcome("done", 0, "", None, 20, "kept", "")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(config=CONFIG, device="cpu", backend="gloo", precision="fp32", prepared=tmp_path / "prepared", run=tmp_path)


def judged(job: Job, result: LaunchResult, *lines: dict[str, Any]) -> Outcome:
    told = [STARTED, {"kind": "metrics", "at": 0, "step": 10, "values": {}}, *lines]
    job.journal.write_text("".join(json.dumps(line) + "\n" for line in told))
    return judge(result, job, "kept", "dvc repro")


FINISHED, SAVED = {"kind": "finished", "step": 20, "weights_sha256": "0" * 64}, {"kind": "stopped", "step": 12}


def test_a_run_whose_ranks_finished_is_done_whatever_came_then(job: Job) -> None:
    assert judged(job, LaunchResult(), FINISHED) == DONE
    assert judged(job, LaunchResult(stopped_by=signal.SIGINT, stopped_at_once=True, exit_code=-9), FINISHED) == DONE


def test_ranks_that_end_without_a_word_have_not_finished(job: Job) -> None:
    cause = f"torchrun ended with 0 and no word from a rank; see {job.run / 'logs'}"
    assert judged(job, LaunchResult()) == Outcome("failed", 6, cause, None, 10, "kept", "dvc repro")


def test_an_earlier_start_is_no_word_of_the_newest(job: Job) -> None:
    again = [STARTED, {"kind": "metrics", "at": 0, "step": 22, "values": {}}]
    assert judged(job, LaunchResult(stopped_by=signal.SIGTERM, exit_code=1), FINISHED, *again).step == 22
    assert judged(job, LaunchResult(exit_code=1, failures=[FAILED]), SAVED, STARTED).outcome == "failed"
    assert judged(job, LaunchResult(exit_code=-15, failures=[FAILED]), SAVED, STARTED).outcome == "failed"


def test_an_evaluation_has_no_steps_of_its_own(job: Job) -> None:
    job = job.model_copy(update={"weights": job.run / "model.safetensors"})
    again = [FINISHED, {"kind": "metrics", "at": 0, "step": 10, "values": {"test/accuracy": 0.5}}, STARTED | {"stage": "evaluate"}]
    assert judged(job, LaunchResult(), *again) == DONE
    cause = "the evaluation was stopped on request"
    stopped = LaunchResult(stopped_by=signal.SIGTERM, exit_code=1)
    assert judged(job, stopped, *again) == Outcome("stopped", 75, cause, None, 20, "kept", "dvc repro")


def test_a_run_without_figures_ended_in_step_0(job: Job) -> None:
    job.journal.write_text(json.dumps(STARTED) + "\n")
    assert judge(LaunchResult(stopped_by=signal.SIGTERM, exit_code=1), job, None, "dvc repro").step == 0


@pytest.mark.parametrize(
    ("result", "lines", "exit_code", "cause"),
    [
        (LaunchResult(stopped_by=signal.SIGINT), [SAVED], 75, "stopped on request at step 12"),
        (LaunchResult(exit_code=0), [SAVED], 75, "stopped on request at step 12"),
        (LaunchResult(exit_code=1), [SAVED], 75, "stopped on request at step 12"),
        (LaunchResult(exit_code=-15), [SAVED], 75, "torchrun was ended by SIGTERM; its ranks saved at step 12"),
        (LaunchResult(exit_code=-1), [SAVED], 75, "torchrun was ended by SIGHUP; its ranks saved at step 12"),
        (LaunchResult(exit_code=-15, stopped_by=signal.SIGTERM), [SAVED], 75, "stopped on request at step 12"),
        (LaunchResult(stopped_by=signal.SIGTERM, exit_code=1, agent_error="no"), [SAVED], 75, "stopped on request at step 12"),
        (LaunchResult(agent_was_stopped=True, exit_code=1, agent_error="no"), [SAVED], 75, "stopped on request at step 12"),
        (LaunchResult(stopped_by=signal.SIGTERM, exit_code=1), [], 75, "stopped on request after step 10, when nothing could be saved"),
        (LaunchResult(agent_was_stopped=True, exit_code=1), [], 75, "stopped on request after step 10, when nothing could be saved"),
        (
            LaunchResult(stopped_by=signal.SIGTERM, exit_code=1, failures=[FAILED]),
            [],
            75,
            "stopped on request after step 10, when nothing could be saved",
        ),
        (LaunchResult(stopped_by=signal.SIGINT, stopped_at_once=True), [SAVED], 130, "stopped at once by a second signal"),
        (LaunchResult(stopped_by=signal.SIGTERM, stopped_at_once=True, exit_code=1), [], 143, "stopped at once by a second signal"),
    ],
)
def test_what_was_asked_to_stop_is_stopped(job: Job, result: LaunchResult, lines: list[Any], exit_code: int, cause: str) -> None:
    step = 12 if lines else 10
    assert judged(job, result, *lines) == Outcome("stopped", exit_code, cause, None, step, "kept", "dvc repro")


def test_who_only_waited_for_another_machine_has_not_failed(job: Job) -> None:
    waited = replace(FAILED, exit_code=6, waiting=True)
    assert judged(job, LaunchResult(stopped_by=signal.SIGTERM, exit_code=1, failures=[waited])).exit_code == 75


def test_a_machine_that_is_lost_before_a_rank_began_is_what_is_said(job: Job) -> None:
    end = judged(job, LaunchResult(exit_code=1, nobody_came_back=True))
    assert (end.exit_code, end.cause) == (6, "a machine was lost before a rank began, and did not come back in 600 s")


def test_the_root_cause_is_of_the_same_start_and_other_machines_number_their_own() -> None:
    reset = Failure(0, 1, "Connection reset by peer", 3, 30, at=1000.0)
    assert LaunchResult(failures=[replace(FAILED, attempt=3, host=None, at=400.0), reset]).root_cause().attempt == 3
    crash = replace(FAILED, attempt=3, host="b")
    assert LaunchResult(failures=[replace(crash, at=400.0), reset]).root_cause() == reset, "long ago"
    assert LaunchResult(failures=[replace(crash, attempt=0, at=995.0), reset]).root_cause().host == "b"


@pytest.mark.parametrize("code", [2, 3, 4, 5, 6])
def test_a_failure_that_no_start_can_cure_is_no_stop(job: Job, code: int) -> None:
    result = LaunchResult(stopped_by=signal.SIGTERM, exit_code=1, failures=[FAILED, replace(FAILED, exit_code=code, attempt=1)])
    assert judged(job, result).outcome != "stopped"


def test_ranks_of_whom_nothing_was_heard_are_lost(job: Job) -> None:
    cause = f"torchrun ended with 1 and no word from a rank; see {job.run / 'logs'}"
    lost = Outcome("failed", 6, cause, None, 10, "kept", "dvc repro")
    assert judged(job, LaunchResult(exit_code=1)) == lost
    assert judged(job, LaunchResult(exit_code=1, unexplained=True, failures=[FAILED])) == lost


def test_an_agent_that_failed_by_itself_was_not_asked_to_stop_though_its_ranks_saved(job: Job) -> None:
    result, why = LaunchResult(exit_code=1, agent_error="OSError: no"), "torchrun's agent failed: OSError: no"
    assert judged(job, result, SAVED) == Outcome("failed", 6, f"{why}; see {job.run / 'logs'}", None, 12, "kept", "dvc repro")
    killed = replace(result, failures=[replace(FAILED, exit_code=-9)])
    assert judged(job, killed, SAVED).cause == f"rank 1 was ended by SIGKILL in step 7; {why}; logs: {job.run / 'logs'}"


def test_torchrun_without_a_word_on_a_full_disk_died_of_that(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(job.run)
    for free_bytes, name in ((1 << 20, "failed"), ((1 << 20) - 1, "machine"), (0, "machine")):
        full = usage._replace(free=free_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, full=full: full if folder == job.run else usage)
        assert judged(job, LaunchResult(exit_code=1)).outcome == name
    cause = f"{job.run}: the disk is full, and torchrun died of it; make room"
    assert judged(job, LaunchResult(exit_code=1)) == Outcome("machine", 4, cause, None, 10, "kept", "dvc repro")
    assert judged(job, LaunchResult(exit_code=1, failures=[FAILED])).outcome == "failed"


@pytest.mark.parametrize(("code", "name"), [(2, "configuration"), (3, "data"), (4, "machine")])
def test_a_rank_that_says_what_is_wrong_is_quoted(job: Job, code: int, name: str) -> None:
    failure = replace(FAILED, exit_code=code, cause="params.yaml: no")
    assert judged(job, LaunchResult(exit_code=1, failures=[failure])) == Outcome(name, code, "params.yaml: no", 1, 10, "kept", "dvc repro")


def test_a_run_that_diverged_has_no_command_to_go_on(job: Job) -> None:
    failure = replace(FAILED, exit_code=5, cause="the loss is not finite", step=15)
    assert judged(job, LaunchResult(exit_code=1, failures=[failure])) == Outcome("diverged", 5, "the loss is not finite", 1, 15, "kept", "")


def test_a_rank_that_hung_or_could_not_say_why_is_lost(job: Job) -> None:
    hung = replace(FAILED, exit_code=6, cause="rank 1 stands still")
    assert judged(job, LaunchResult(exit_code=1, failures=[hung])) == Outcome(
        "failed", 6, "rank 1 stands still", 1, 10, "kept", "dvc repro"
    )
    silent = f"{job.run}: a rank could not go on nor say why; see that there is room and a right to write"
    assert judged(job, LaunchResult(exit_code=1, failures=[replace(hung, exit_code=9, cause="")])).cause == silent


def test_want_of_memory_is_the_machines_whatever_the_exit_code(job: Job) -> None:
    for failure in (replace(FAILED, exit_code=-9, oom_killed=True), replace(FAILED, exit_code=2, cause="CUDA out of memory")):
        end = judged(job, LaunchResult(exit_code=1, failures=[failure]))
        assert (end.outcome, end.exit_code, end.rank, end.command) == ("machine", 4, 1, "dvc repro")
        assert end.cause == describe(failure, CONFIG)


def test_a_rank_that_failed_again_and_again_is_described_with_the_reason_for_giving_up(job: Job) -> None:
    logs = f"logs: {job.run / 'logs'}"
    end = judged(job, LaunchResult(exit_code=1, failures=[FAILED]))
    assert end == Outcome("failed", 6, f"rank 1 failed in step 7: ValueError: no; torchrun gave up; {logs}", 1, 10, "kept", "dvc repro")
    assert judged(job, LaunchResult(exit_code=1, failures=[FAILED], given_up="lost thrice")).cause.endswith(f": no; lost thrice; {logs}")
    gone = judged(job, LaunchResult(exit_code=1, failures=[FAILED], given_up="lost thrice", nobody_came_back=True))
    assert gone.cause.endswith(f": no; the lost machine did not come back in 600 s; {logs}")
    assert judged(job, LaunchResult(exit_code=1, failures=[replace(FAILED, exit_code=-9)])).exit_code == 6
    named = judged(job, LaunchResult(exit_code=1, failures=[replace(FAILED, log="logs/1/stderr.log")]))
    assert named.cause.endswith("torchrun gave up; logs: logs/1/stderr.log")


@pytest.mark.parametrize(
    ("dist", "words"),
    [
        ({}, "lower dist.batch_size_per_gpu (128) or raise dist.lanes (4)"),
        ({"batch_size_per_gpu": None, "global_batch": 256}, "lower dist.global_batch (256) or raise dist.lanes (4)"),
        ({"lanes": None, "reduction": "native"}, "lower dist.batch_size_per_gpu (128)"),
        (
            {"lanes": None, "reduction": "native", "batch_size_per_gpu": None, "global_batch": 256},
            "lower dist.global_batch (256) or raise dist.accumulation (1)",
        ),
    ],
)
def test_what_helps_where_memory_is_short_is_what_has_an_effect(dist: dict[str, object], words: str) -> None:
    before = Config.model_validate({"dist": dist})
    said = describe(replace(FAILED, exit_code=-9, oom_killed=True), before)
    assert said == f"rank 1 ran out of memory in step 7; {words}, or give it more memory"
    for how, key, value in re.findall(r"(lower|raise) dist\.(\w+) \((\d+)\)", said):
        after = Config.model_validate({"dist": dist | {key: int(value) // 2 if how == "lower" else int(value) * 2}})
        assert after.dist.images_per_step // after.dist.pieces < before.dist.images_per_step // before.dist.pieces, key


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (FAILED, "rank 1 failed in step 7: ValueError: no"),
        (replace(FAILED, cause=""), "rank 1 failed in step 7: exit code 1"),
        (replace(FAILED, rank=0, step=0, host="node-1"), "rank 0 on node-1 failed in step 0: ValueError: no"),
        (replace(FAILED, rank=None, step=-1), "a rank failed before its first step: ValueError: no"),
        (replace(FAILED, exit_code=-11, cause=""), "rank 1 was ended by SIGSEGV in step 7"),
        (replace(FAILED, exit_code=0, cause=""), "rank 1 was lost in step 7"),
        (replace(FAILED, cause="Connection reset by peer"), "rank 1 lost its connection to another rank in step 7"),
        (
            replace(FAILED, exit_code=-9, oom_killed=True),
            "rank 1 ran out of memory in step 7; lower dist.batch_size_per_gpu (48) or raise dist.lanes (8), or give it more memory",
        ),
    ],
)
def test_a_failure_is_described_in_a_few_words(failure: Failure, words: str) -> None:
    assert describe(failure, CONFIG) == words


def test_a_launcher_that_cannot_go_on_names_the_file_and_the_reason() -> None:
    cure = "; see that there is room and a right to write"
    end = broken(OSError(28, "No space left on device", "runs/a"), 20, "kept", "dvc repro")
    assert end == Outcome("machine", 4, f"runs/a: No space left on device{cure}", None, 20, "kept", "dvc repro")
    cure = "see that there is memory, and room for another process: ulimit -u"
    assert broken(OSError(11, "Try again"), 0, None, "").cause == f"starting the ranks: Try again; {cure}"
    assert broken(OSError("no pipe"), 0, None, "").cause == "starting the ranks: no pipe"


def test_an_error_before_the_ranks_keeps_its_name_and_exit_code() -> None:
    assert broken(DataError("no such image"), 0, None, "dvc repro") == Outcome("data", 3, "no such image", None, 0, None, "dvc repro")
    assert broken(PeerError("nobody came"), 7, "kept", "x") == Outcome("failed", 6, "nobody came", None, 7, "kept", "x")
    assert unpublished(DONE, DataError("no such image"), "x") == Outcome("data", 3, "no such image", None, 20, "kept", "x")


def test_what_could_not_be_put_in_place_after_a_run_is_the_machines() -> None:
    error = OSError(28, "No space left on device", "models")
    cause = "models: No space left on device; see that there is room and a right to write"
    assert unpublished(DONE, error, "dvc repro") == Outcome("machine", 4, cause, None, 20, "kept", "dvc repro")
    assert unpublished(DONE, MachineError("no good model"), "dvc repro").cause == "no good model"
    stopped = replace(DONE, outcome="stopped", exit_code=75)
    assert unpublished(stopped, error, "dvc repro") == stopped
    assert outcome.NAMES[5] == "diverged"
