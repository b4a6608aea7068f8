"""One rank of a training, started by torchrun: `python -m pipeline.training.train_rank JOB`."""

import contextlib
import ctypes
import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from pipeline import heartbeat, parallel, ranks
from pipeline import job as jobs
from pipeline.config import ConfigError, DataError, MachineError
from pipeline.data.order import Order
from pipeline.files import locked
from pipeline.hardware.environment import FIXED
from pipeline.heartbeat import FINISHING
from pipeline.job import Job
from pipeline.parallel.lanes import Lanes
from pipeline.parallel.shares import by_speed
from pipeline.ranks import Ranks
from pipeline.timeouts import alarm_seconds, collective_seconds
from pipeline.tracking.journal import LANES, Journal, Notes, Silent, Writer
from pipeline.training import loop, schedule
from pipeline.training.clipping import Clipping
from pipeline.training.export import export
from pipeline.training.guard import Diverged, check_gpu_libraries
from pipeline.training.memory import keep_freed_memory
from pipeline.training.monitor import Monitor
from pipeline.training.state import State
from pipeline.training.stopping import Stop
from pipeline.training.work import begin

# DDP and every optimizer import it at their first use.
PRELOAD = ("torch._dynamo",)
PR_SET_PDEATHSIG = 1
# What a disk says, and no network.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES)


def main(job: Job) -> None:
    """Train, and write what the launcher publishes."""
    # An error of this rank lets a checkpoint be finished, as long as its peers live.
    with joined(job) as group, group.on_rank_zero(lambda: locked(job.writing), contextlib.nullcontext()), ThreadPoolExecutor(1) as executor:
        journal = group.on_rank_zero(lambda: Journal(job.journal), Silent())
        logging.getLogger("pipeline").addHandler(Notes(journal))
        state, step, finished = train(job, group, journal, executor)
        if not finished:
            journal.event("stopped", step=step)
            return
        digest = state.weights_sha256()
        group.while_others_wait(lambda: export(job), FINISHING)
        journal.event("finished", step=step, weights_sha256=digest)


@contextmanager
def joined(job: Job) -> Generator[Ranks]:
    """Make numerics deterministic and enter the process group; leave it at the end."""
    fix_bits(job.config.dist.threads_per_rank)
    if job.device == "cuda":
        check_gpu_libraries()
    timeout_seconds = collective_seconds(job.config.dist.timeout_seconds)
    info = ranks.rendezvous(job.config.dist.world_size, timeout_seconds, job.config.dist.init_method)
    group = ranks.init_group(job.device, job.backend, info, timeout_seconds)
    yield group
    # Not after an error: the barrier would wait for a peer that waits for this rank in a collective.
    ranks.shutdown_group(group)


def fix_bits(threads: int) -> None:
    """Set everything in torch that the bits depend on."""
    # cuBLAS reads its part at its first call; a rank that the launcher has not started may lack it.
    os.environ |= FIXED
    torch.set_num_threads(threads)
    # Deterministic algorithms or an error; `use_deterministic_algorithms` imports the compiler first, for two seconds.
    torch.set_deterministic_debug_mode("error")
    # Filling fresh memory finds bugs, and costs a pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.benchmark = False
    # Products in full fp32 on every device. torch.export reads the old switch, and raises where it contradicts the new ones.
    backends = torch.backends
    backends.cudnn.allow_tf32 = False
    on_cpu, on_gpu = backends.mkldnn, backends.cudnn
    for part in (backends, backends.cuda.matmul, on_gpu, on_gpu.conv, on_gpu.rnn, on_cpu.matmul, on_cpu.conv, on_cpu.rnn):
        part.fp32_precision = "ieee"  # pyright: ignore[reportAttributeAccessIssue]
    # Partial sums of bf16 products stay in fp32.
    backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def train(job: Job, group: Ranks, journal: Writer, executor: Executor | None = None) -> tuple[State, int, bool]:
    """All of a training on one rank; returns the state, the step reached, and True if all is done."""
    config, work = job.config, begin(job, group.device, group.all_on_this_machine)
    group.bound = work.bound
    lanes = Lanes(config.dist.pieces_per_rank, group.rank, config.dist.images_per_step)
    if config.dist.lanes_per_rank == "auto":
        lanes = by_speed(lanes, work.task, group)
        journal.event(LANES, per_rank=lanes.per_rank)
    strategy = parallel.build(work.task, lanes, group, config.dist)
    work.reader.own = strategy.reads
    optimizer = schedule.optimizer(config.train, list(strategy.parameters.values()))
    strategy.follow(optimizer)
    state = State(work.model, optimizer, strategy, group, config.train.ema_decay)
    evaluation = work.evaluation(group, strategy.sharded)
    stop, steps = Stop(group, alarm_seconds(config.dist.grace_seconds)), plan(job, work.order)
    parts = loop.Parts(
        strategy=strategy,
        state=state,
        guard=work.guard(state, group, lambda: lanes),
        clipping=Clipping(state, group, config.train.clip_norm),
        schedule=schedule.build(config, steps.per_epoch),
        checkpoints=work.checkpoints(group, executor),
        journal=journal,
        stop=stop,
        validate=lambda: evaluation(work.model, schedule.autocast_dtype(job.precision), stop.agreed),
        heartbeat=group.heartbeat,
        monitor=Monitor(group, config.dist.nodes),
    )
    step, finished = loop.run(steps, parts)
    stop.close()
    return state, step, finished


def plan(job: Job, order: Order) -> loop.Steps:
    """Return at which steps to log, validate and save."""
    per_epoch, config = order.steps_per_epoch, job.config
    per_log = config.tracking.log_every_steps or min(50, max(1, per_epoch // 20))
    total, batch = per_epoch * config.train.epochs, config.dist.images_per_step
    return loop.Steps(total, per_epoch, per_log, config.checkpoint.every_steps, batch, job.until)


def run_as_rank(main: Callable[[Job], None]) -> None:
    """Run `main` as a rank: end with the parent process, log to a file of its own, turn errors into exit codes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.get("LOCKSTEP_AGENT", str(os.getppid())) != str(os.getppid()):
            # The agent has gone while this process began: nobody would hear of it.
            sys.exit(1)
    keep_freed_memory()
    job = jobs.read(Path(sys.argv[1]))
    sys.excepthook = exit_at_once
    record(lambda: run_or_exit(main, job))()


def run_or_exit(main: Callable[[Job], None], job: Job) -> None:
    """Run `main`; an error of a known kind becomes its exit code, with the reason for the launcher."""
    try:
        main(job)
    except (ConfigError, DataError, MachineError, Diverged) as error:
        exit_with_reason(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in DISK:
            raise
        exit_with_reason(
            f"{error.filename or job.run}: {error.strerror}; see that there is room and a right to write", MachineError.exit_code
        )


def exit_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error and end this process: the interpreter's own end may wait for an NCCL kernel that waits for a lost peer."""
    # torch's own hook stands before this one, reads what it writes to sys.stderr, and never gets to print it.
    # On a full disk nothing can be printed.
    with contextlib.suppress(OSError):
        traceback.print_exception(kind, error, trace, file=sys.__stderr__)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    if not issubclass(kind, KeyboardInterrupt):
        os._exit(1)


def exit_with_reason(reason: str, exit_code: int) -> None:
    """Write the exit reason and end this process at once, without leaving the group."""
    logging.getLogger(__name__).error("%s", reason)
    with contextlib.suppress(OSError):
        heartbeat.write_exit_reason(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent, reason, exit_code)
    os._exit(exit_code)


if __name__ == "__main__":
    run_as_rank(main)
