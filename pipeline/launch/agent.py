"""torchrun with a report: its own parser, rendezvous and agent, which also tells the supervisor of every start and failure.

`python -m pipeline.launch.agent` takes torchrun's arguments and starts ranks as torchrun does, but that a module's ranks are forked
from one process which has imported it, or spawned under `--start-method=spawn` (Linux). With LOCKSTEP_EVENTS, the number of an open
pipe, it writes one JSON object a line there; without it nobody listens.
"""

# torch decorates these methods with a profiler that hides their types.
# pyright: reportIncompatibleVariableOverride=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException, Std
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args

from pipeline.forkserver import ForkServer, SpawnServer
from pipeline.stop_signals import STOP_SIGNALS
from pipeline.timeouts import EXIT_BARRIER_SECONDS

EVENTS = "LOCKSTEP_EVENTS"
# The process that ranks end with.
AGENT = "LOCKSTEP_AGENT"


class AttemptLogs(DefaultLogsSpecs):
    """A folder of its own for every start: torchrun counts failures alone, and empties the folder on a change of membership."""

    attempt, folder = -1, ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Number the start and make its folders."""
        self.attempt += 1
        for env in envs.values():
            env["TORCHELASTIC_RESTART_COUNT"] = str(self.attempt)
        found = super().reify(envs)
        self.folder = str(Path(found.filtered_stderr).parent)
        return found


class Agent(LocalElasticAgent):
    """torchrun's agent, which reports starts and failures, and ends ranks that lost a peer at once: they can neither go on nor save."""

    def __init__(self, spec: WorkerSpec, logs: AttemptLogs, config: LaunchConfig):
        super().__init__(
            spec,
            logs,
            start_method=config.start_method,
            exit_barrier_timeout=EXIT_BARRIER_SECONDS,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=config.shutdown_timeout,  # pyright: ignore[reportArgumentType]
        )
        self._logs = logs

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        assert self._pcontext is not None
        # torchrun would parse the error file of a rank that was killed while it wrote it, and end.
        self._pcontext.error_files = dict.fromkeys(pids, "")
        # torchrun's own handlers would interrupt the wait for ranks that save with every further signal.
        for number in STOP_SIGNALS:
            signal.signal(number, _stop)
        report("started", attempt=self._logs.attempt, folder=self._logs.folder)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        running = self._pcontext.subprocess_handlers  # pyright: ignore[reportAttributeAccessIssue]
        codes = {rank: handler.proc.poll() for rank, handler in running.items()}
        if failed := {rank: code for rank, code in codes.items() if code}:
            self._pcontext.close(signal.SIGKILL)
            report("failed", attempt=self._logs.attempt, exit_codes=failed, folder=self._logs.folder)
        elif None in codes.values():
            # torchrun would look again, and end the peers of a rank that has failed since by SIGTERM.
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # Not by SIGTERM, which asks a rank to save and stop.
        self._shutdown(signal.SIGKILL)
        super()._restart_workers(worker_group)


def report(event: str, **fields: Any) -> None:
    """Write an event for the supervisor."""
    if EVENTS in os.environ:
        # Without a supervisor to read it, the parent's death signal ends us anyway.
        with contextlib.suppress(BrokenPipeError):
            os.write(int(os.environ[EVENTS]), (json.dumps({"event": event} | fields) + "\n").encode())


def _stop(number: int, _: FrameType | None) -> None:
    """Raise SignalException at the first signal; any further one changes nothing."""
    for one in STOP_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    report("stopping", signal=number)
    raise SignalException(f"process {os.getpid()} got signal {number}", signal.Signals(number))


def launch(config: LaunchConfig, command: str, arguments: list[str], logs: AttemptLogs, kind: type[Agent]) -> int:
    """Run the agent to its end, as torchrun's `launch_agent` does; returns torchrun's exit code."""
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command,
        args=tuple(arguments),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
    )
    agent, shut_down = kind(spec, logs, config), True
    try:
        result = agent.run()
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        return 1 if result is None or result.is_failed() else 0
    except SignalException as error:
        # The others may go on: a rendezvous that is shut down is closed for all.
        shut_down = False
        return 128 + error.sigval
    except RendezvousTimeoutError:
        report("rendezvous-timeout")
        return 1
    finally:
        if error := sys.exception():
            report("agent-failed", cause=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        if shut_down:
            spec.rdzv_handler.shutdown()


def start_ranks(server: ForkServer | SpawnServer) -> None:
    """Let the ranks of a module be started by this where torchrun would execute them."""
    execute = SubprocessHandler._popen  # pyright: ignore[reportPrivateUsage]
    report("fork-server", pid=server.pid)

    def start(self: Any, words: tuple[str, ...], environment: dict[str, str]) -> Any:
        outputs = [own.fileno() if own else standard for standard, own in ((1, self._stdout), (2, self._stderr))]
        return server.start(list(words), environment, *outputs) or execute(self, words, environment)

    # torch has no hook for this.
    SubprocessHandler._popen = start  # pyright: ignore[reportPrivateUsage]


def main(kind: type[Agent] = Agent) -> int:
    """Do what torchrun does with these arguments."""
    options = parse_args(sys.argv[1:])
    if options.module and sys.platform == "linux":
        start_ranks(SpawnServer() if "--start-method=spawn" in sys.argv else ForkServer(options.training_script))
    config, command, arguments = config_from_args(options)
    assert isinstance(command, str)
    os.environ[AGENT] = str(os.getpid())
    logs = AttemptLogs(options.log_dir, Std.from_str(options.redirects), Std.from_str(options.tee))
    return launch(config, command, arguments, logs, kind)


if __name__ == "__main__":
    sys.exit(main())
