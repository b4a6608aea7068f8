"""The same faults done to a plain script (`bench/plain.py`) and to Lockstep: `python bench/faults.py [CASE…]` prints a table of both.

Both are hurt at the same optimizer step. Nothing is taken from what they say: steps are counted by a hook, weights are read from the
newest checkpoint, runs and points from MLflow's store. Each is compared with the same script left alone.
"""

import argparse
import contextlib
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from mlflow import MlflowClient

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.arguments import add_parts  # noqa: E402
from bench.trial import COUNTER, EXPERIMENT, Lockstep, Plain, Trial, kill_tree, spawn  # noqa: E402
from pipeline.training.checkpoint_file import weights_sha256  # noqa: E402


def baseline(trial: Trial) -> Trial:
    trial.start()
    return trial.finish()


def killed_rank(trial: Trial) -> Trial:
    trial.start()
    if trial.reaches(110):
        trial.kill_rank(1)
    return trial.finish()


def killed_job(trial: Trial) -> Trial:
    trial.start()
    if trial.reaches(110):
        trial.kill()
    return baseline(trial)


def damaged(trial: Trial, damage: Callable[[bytearray], None]) -> Trial:
    trial.start()
    if trial.reaches(130):
        trial.kill()
    path = trial.side.newest(trial.folder)
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    return baseline(trial)


def cut(content: bytearray) -> None:
    del content[len(content) // 2 :]


def flip(content: bytearray) -> None:
    content[len(content) // 3] ^= 0x10


def ten_kills(trial: Trial) -> Trial:
    """Every kill 25 steps after the one before, of either rank in turn; a command that gave up is given again."""
    trial.start()
    for number in range(10):
        until = trial.steps() + 25
        while not trial.reaches(until):
            if trial.exits[-1] == "exit 0":
                trial.exits.append(f"after {number} kills")
                return trial
            trial.start()
        trial.kill_rank(number % 2)
    trial.finish()
    while trial.exits[-1] != "exit 0" and len(trial.exits) < 6:
        baseline(trial)
    return trial


def closed_port(trial: Trial) -> Trial:
    with socket.create_server(("127.0.0.1", 0)) as server:
        trial.uri = f"http://127.0.0.1:{server.getsockname()[1]}"
    baseline(trial)
    trial.uri = trial.store
    return catch_up(trial)


def dying_server(trial: Trial) -> Trial:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    trial.uri = f"http://127.0.0.1:{port}"
    with serving(trial, port):
        trial.start()
        trial.reaches(110)
    trial.finish()
    with serving(trial, port):
        return catch_up(trial)


@contextlib.contextmanager
def serving(trial: Trial, port: int) -> Generator[None]:
    """A real MLflow server, killed in the end."""
    command = [sys.executable, "-m", "mlflow", "server", "--workers=1", f"--port={port}", f"--backend-store-uri={trial.store}"]
    server = spawn([*command, f"--artifacts-destination={trial.folder / 'artifacts'}"], trial.folder)
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.2)
        yield
    finally:
        kill_tree(server)


def catch_up(trial: Trial) -> Trial:
    """MLflow is back; Lockstep has a command for that."""
    if isinstance(trial.side, Lockstep):
        command = [sys.executable, "-m", "pipeline", "sync", "--params", str(trial.folder / "params.yaml")]
        trial.exits.append(f"sync exit {spawn(command, trial.folder, MLFLOW_TRACKING_URI=trial.uri).wait()}")
    return trial


# Case of FAULTS: what is done, how, and other settings.
CASES: dict[str, tuple[str, Callable[[Trial], Trial], dict[str, float]]] = {
    "1": ("SIGKILL of rank 1 at step 110", killed_rank, {}),
    "2": ("SIGKILL of the whole job at step 110; run again", killed_job, {}),
    "9a": ("killed at step 130, newest checkpoint cut in half; run again", lambda trial: damaged(trial, cut), {}),
    "9b": ("killed at step 130, one bit of the newest checkpoint flipped; run again", lambda trial: damaged(trial, flip), {}),
    "15": (
        "a weight decay that diverges once the learning rate is warm",
        baseline,
        {"learning_rate": 0.5, "warmup_epochs": 4, "weight_decay": 20.0},
    ),
    "16a": ("MLflow's server is down from the start", closed_port, {}),
    "16b": ("MLflow's server is killed at step 110, and back in the end", dying_server, {}),
    "28": ("a rank killed ten times, every 25 steps", ten_kills, {}),
}


@dataclass(frozen=True)
class Reference:
    """What a side does when left alone."""

    sha256: str
    steps: int
    points: set[int]
    seconds: float


def points(trial: Trial) -> list[tuple[str, list[int]]]:
    """Status and steps of the training loss of every run that MLflow has, from old to new."""
    client = MlflowClient(trial.store)
    runs = [run for one in client.search_experiments() for run in client.search_runs([one.experiment_id], order_by=["start_time"])]
    return [(run.info.status, [one.step for one in client.get_metric_history(run.info.run_id, "train/loss")]) for run in runs]


def reference(trial: Trial) -> Reference:
    ((status, found),) = points(baseline(trial))
    assert (trial.exits, status) == (["exit 0"], "FINISHED"), trial.folder
    digest = weights_sha256(trial.side.weights(trial.side.newest(trial.folder)))
    return Reference(digest, trial.steps(), set(found), trial.seconds)


def result(trial: Trial, left_alone: Reference) -> str:
    """One cell."""
    parts = [", ".join(trial.exits), bits(trial, left_alone)]
    if "exit 0" in trial.exits:
        parts.append(f"{trial.steps() - left_alone.steps} steps repeated, {trial.seconds - left_alone.seconds:+.0f} s")
    else:
        parts.append(f"{trial.steps()} steps computed of {left_alone.steps}")
    return "; ".join([*parts, told(trial, left_alone)])


def bits(trial: Trial, left_alone: Reference) -> str:
    path = trial.side.newest(trial.folder)
    try:
        weights = trial.side.weights(path)
    except (OSError, RuntimeError):
        return "no readable checkpoint" if path.exists() else "no checkpoint"
    if not all(tensor.isfinite().all() for tensor in weights.values()):
        return "the checkpoint holds NaN"
    if "exit 0" not in trial.exits:
        return "the checkpoint is finite"
    return "the same bits" if weights_sha256(weights) == left_alone.sha256 else "OTHER BITS"


def told(trial: Trial, left_alone: Reference) -> str:
    runs = points(trial)
    if not runs:
        return "MLflow: nothing"
    everything = [step for _, steps in runs for step in steps]
    missing = len(left_alone.points - set(runs[-1][1]))
    twice = len(everything) - len(set(everything))
    text = f"MLflow: {len(runs)} run{'s' * (len(runs) > 1)} ({', '.join(status for status, _ in runs)})"
    return f"{text}, {missing} of {len(left_alone.points)} points missing in the last, {twice} sent twice"


def main() -> None:
    parser = argparse.ArgumentParser(description="The same faults done to a plain torchrun script and to Lockstep.")
    add_parts(parser, CASES, "CASE")
    wanted = parser.parse_args().parts
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        template = scratch / "template"
        template.mkdir()
        (scratch / "hook").mkdir()
        (scratch / "hook" / "sitecustomize.py").write_text(COUNTER)
        (template / "params.yaml").write_text(yaml.safe_dump(EXPERIMENT))
        prepare = [sys.executable, "-m", "pipeline", "prepare", "--params", str(template / "params.yaml")]
        assert spawn(prepare, template).wait() == 0
        # Made once: a new database takes seconds.
        MlflowClient(f"sqlite:///{template / 'mlflow.db'}").search_experiments()
        sides = (Plain(), Lockstep())
        alone = {side.name: reference(Trial(side, scratch, "alone")) for side in sides}
        for side in sides:
            again = reference(Trial(side, scratch, "again"))
            same = "the same bits" if again.sha256 == alone[side.name].sha256 else "OTHER BITS"
            print(
                f"{side.name}, left alone twice: {same}, {alone[side.name].seconds:.0f} and {again.seconds:.0f} s, {again.steps} steps",
                flush=True,
            )
        print("\n| case | what was done | plain torchrun + torch.save | Lockstep |\n|---|---|---|---|")
        for case in wanted:
            what, hurt, train = CASES[case]
            cells = [result(hurt(Trial(side, scratch, case, **train)), alone[side.name]) for side in sides]
            print(f"| {case} | {what} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
