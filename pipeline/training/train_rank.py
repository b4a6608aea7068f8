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
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

from pipeline import heartbeat, models, parallel, ranks
from pipeline import job as jobs
from pipeline.config import ConfigError, DataError, MachineError, draw_seed
from pipeline.data import Split, augment, mixing, store
from pipeline.data.batches import Batches, Pixels, balanced, resident
from pipeline.data.order import Order
from pipeline.files import locked
from pipeline.hardware.binding import bind_to_cpus
from pipeline.hardware.environment import FIXED
from pipeline.heartbeat import FINISHING
from pipeline.job import Job
from pipeline.models import pretrained
from pipeline.models.pools import check_backward
from pipeline.parallel.lanes import Lanes, Task
from pipeline.parallel.shares import by_speed
from pipeline.ranks import Ranks
from pipeline.timeouts import alarm_seconds, collective_seconds
from pipeline.tracking.journal import LANES, Journal, Notes, Silent, Writer
from pipeline.training import loop, schedule
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.clipping import Clipping
from pipeline.training.evaluation import Evaluation
from pipeline.training.export import export
from pipeline.training.guard import Diverged, NonFiniteGuard, check_gpu_libraries, write_diagnosis
from pipeline.training.memory import free_bytes, keep_freed_memory
from pipeline.training.monitor import Monitor
from pipeline.training.state import State
from pipeline.training.stopping import Stop

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


def build_model(job: Job, manifest: store.Manifest, device: torch.device) -> nn.Module:
    """Return the experiment's model with its initial weights."""
    channels, side, _ = manifest.shape
    torch.manual_seed(draw_seed(job.config.seed, "weights"))
    model = models.of(job.config.model, channels, side, manifest.num_classes)
    return model.to(device=device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]


def train(job: Job, group: Ranks, journal: Writer, executor: Executor | None = None) -> tuple[State, int, bool]:
    """All of a training on one rank; returns the state, the step reached, and True if all is done."""
    config = job.config
    manifest = store.read_manifest(job.prepared)
    pixels = Pixels(manifest.mean, manifest.std, group.device)
    model = build_model(job, manifest, group.device).train()
    if job.first_weights is not None:
        pretrained.begin(model, job.first_weights.file, job.first_weights.sha256, config.model.frozen)
    check_backward(model, config.model.name, group.device)
    split, validation, hold = open_splits(job, group.device)
    bind_to_cpus(group.device.type, config.dist.threads_per_rank, group.all_on_this_machine)
    order = Order(config.seed, len(split.labels), config.dist.images_per_step, config.dist.pieces)
    reader = batches(job, split, pixels, order, hold, manifest)
    weights = balanced(split.labels, group.device) if config.train.class_weights == "balanced" else None
    task, lanes = cut(job, model, reader, group, journal, weights)
    strategy = parallel.build(task, lanes, group, config.dist)
    reader.own = strategy.reads
    optimizer = schedule.optimizer(config.train, list(strategy.parameters.values()))
    strategy.follow(optimizer)
    state = State(model, optimizer, strategy, group, config.train.ema_decay)
    evaluation = Evaluation(validation, pixels, manifest.num_classes, group, hold, strategy.sharded)
    stop, steps = Stop(group, alarm_seconds(config.dist.grace_seconds)), plan(job, order)
    explain = partial(write_diagnosis, job.run / "diverged.json", task, lanes, group, order.lane)
    parts = loop.Parts(
        strategy=strategy,
        state=state,
        guard=NonFiniteGuard(state, group, explain),
        clipping=Clipping(state, group, config.train.clip_norm),
        schedule=schedule.build(config, steps.per_epoch),
        checkpoints=Checkpoints(job.checkpoints, config.checkpoint.keep, group, job.journal, executor),
        journal=journal,
        stop=stop,
        validate=lambda: evaluation(model, schedule.autocast_dtype(job.precision), stop.agreed),
        heartbeat=group.heartbeat,
        monitor=Monitor(group, config.dist.nodes),
    )
    step, finished = loop.run(steps, parts)
    stop.close()
    return state, step, finished


def cut(job: Job, model: nn.Module, reader: Batches, group: Ranks, journal: Writer, weights: Tensor | None) -> tuple[Task, Lanes]:
    """Return what is computed in a lane, and who owns which lanes."""
    config, dtype = job.config, schedule.autocast_dtype(job.precision)
    autocast = partial(torch.autocast, group.device.type, dtype, enabled=dtype is not None)
    task = Task(model, reader.lane, config.seed, config.train.label_smoothing, autocast, weights, config.model.source is not None)
    lanes = Lanes(config.dist.pieces_per_rank, group.rank, config.dist.images_per_step)
    if config.dist.lanes_per_rank == "auto":
        lanes = by_speed(lanes, task, group)
        journal.event(LANES, per_rank=lanes.per_rank)
    return task, lanes


def open_splits(job: Job, device: torch.device) -> tuple[Split, Split, bool]:
    """Return the training and the validation split, and True if both are to be held in the device's memory."""
    splits = [store.open_split(job.prepared, name) for name in ("train", "validation")]
    return splits[0], splits[1], resident(splits, free_bytes(device))


def batches(job: Job, split: Split, pixels: Pixels, order: Order, hold: bool, manifest: store.Manifest) -> Batches:
    """Return the training batches."""
    given = job.config.data.augment, job.config.seed, len(split.labels)
    return Batches(split, order, augment.build(*given, manifest.mean), pixels, hold, mixing.build(*given, manifest.num_classes))


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
