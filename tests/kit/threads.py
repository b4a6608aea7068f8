"""Ranks as threads of this process: gloo's own groups over the loopback, in a tenth of a second."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from pipeline import ranks


@contextmanager
def _a_group_for_each_thread() -> Iterator[None]:
    """torch keeps one default group a process, but for its own tests one a thread."""
    world = distributed_c10d._world
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    distributed_c10d._world = ThreadLocalWorld()
    try:
        yield
    finally:
        distributed_c10d._world = world
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


@pytest.fixture
def thread_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`thread_ranks(3, function, argument, …)`: what the function returned on every rank; an error of a rank is raised here."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    groups = iter(range(1000))

    def run(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        store = str(tmp_path / f"rendezvous-{next(groups)}")
        results: list[Any] = [None] * size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                group = ranks.init_group("cpu", "gloo", ranks.Rendezvous(FileStore(store, size), rank, size), 5)
                results[rank] = function(group, *arguments)
                ranks.shutdown_group(group)
            except BaseException as error:
                errors.append(error)

        with _a_group_for_each_thread():
            threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return results

    return run


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ranks.Ranks]:
    """The only rank of a group, in the main thread, which alone has signals."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group = ranks.init_group("cpu", "gloo", ranks.Rendezvous(FileStore(str(tmp_path / "alone"), 1), 0, 1), 5)
    yield group
    ranks.shutdown_group(group)
