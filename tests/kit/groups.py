"""Functions on real ranks, in a group of their own without torchrun."""

import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes

from pipeline import ranks
from pipeline.hardware.environment import FIXED
from pipeline.parallel import lane_groups


@dataclass(frozen=True)
class _Place:
    """Where the ranks of a group run."""

    folder: Path
    device: str
    backend: str
    environment: dict[str, str]
    # What each rank does, pickled: to load it may ask the GPU's driver, which reads the environment once.
    work: bytes


def _as_rank(rank: int, size: int, place: _Place) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"} | FIXED | place.environment
    try:
        work: list[tuple[Callable[..., Any], tuple[Any, ...]]] = pickle.loads(place.work)
        torch.set_num_threads(1)
        # Few steps are made: lanes are tried at once in the first.
        lane_groups.TIMED_STEPS = 0
        meeting = ranks.Rendezvous(torch.distributed.FileStore(str(place.folder / "rendezvous"), size), rank, size)
        group = ranks.init_group(place.device, place.backend, meeting, 60)
        results = [function(group, *arguments) for function, arguments in work]
        ranks.shutdown_group(group)
        (place.folder / f"{rank}.result").write_bytes(pickle.dumps(results))
    except BaseException:
        (place.folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[Any]]]:
    """`run_ranks(3, (function, (argument,)), …)`: what every function returned on every rank; a rank that raises fails the test."""

    def run(
        size: int, *work: tuple[Callable[..., Any], tuple[Any, ...]], device: str = "cpu", backend: str = "gloo", **environment: str
    ) -> list[list[Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        # Forked from a server that has imported what takes seconds, and has no threads.
        context = processes.get_context("forkserver")
        context.set_forkserver_preload(["pipeline.training.train_rank", "torch._dynamo"])
        place = _Place(folder, device, backend, environment, pickle.dumps(list(work)))
        parts = [(rank, size, place) for rank in range(size)]
        started = [context.Process(target=_as_rank, args=part, daemon=True) for part in parts]
        for process in started:
            process.start()
        for process in started:
            process.join(600)
            # A rank that hangs must not take part in the tests after this one.
            process.kill()
        errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
        assert not errors, "\n".join(errors)
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(size)]

    return run
