"""The commands; a command's module is imported only when it runs."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # While it imports there is nothing to clean up, and no traceback to show.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys
from importlib.util import find_spec

if __name__ == "__main__" and not all(map(find_spec, ("psutil", "pydantic", "torch"))):
    print("the packages of requirements.lock are not installed here; run: make setup, then: . .venv/bin/activate", file=sys.stderr)
    sys.exit(4)

import argparse
import atexit
import logging
import os
import re
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from pipeline.config import Config, ConfigError, DataError, MachineError, PeerError
from pipeline.config.params import load
from pipeline.files import Paths, describe
from pipeline.output import best_effort_output, wait_no_longer
from pipeline.runs.status import StopRequested

COMMANDS = {
    "prepare": "find, check, split and pack the data set",
    "train": "train on all ranks, go on with a stopped training, or publish a finished one",
    "evaluate": "measure the published model on the test images",
    "verify": "compute a result again, on as many ranks as you like, and say whether every bit is the same",
    "compare": "say which of several runs is best, in what they differ and whether that is fair, and write a page with their curves",
    "sweep": "train every combination of some values, the better half of them further, and the best to the end",
    "watch": "show from another terminal how a run fares, until it ends",
    "sync": "bring MLflow up to date with the journals of all runs",
    "lead": "run a command, such as dvc repro, whose training other machines take part in",
    "join": "take part in what a leader trains, and leave with its verdict",
    "doctor": "check this machine for what would make a run fail, and print a fix for each problem",
}


def main() -> int:
    """Run one command; every error a user can cause is one line and an exit code."""
    arguments = vars(parser().parse_args())
    command, params = arguments.pop("command"), arguments.pop("params")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # It logs every font cache that it builds.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        config = load(params)
        check_names(config, params)
        code: int = command_module(command).run(config, Paths(params), **arguments)
    except (ConfigError, DataError, MachineError, PeerError, StopRequested) as error:
        print(with_params(str(error), params), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(describe(error, command), file=sys.stderr)
        return MachineError.exit_code
    except KeyboardInterrupt:
        print("stopped; nothing half-written is left", file=sys.stderr)
        return 130
    return code


def interrupt(number: int, _: FrameType | None) -> None:
    """Raise KeyboardInterrupt for the first Ctrl-C, and ignore later ones: they would interrupt the cleaning up."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def on_stop(handler: Any) -> None:
    """Set what happens on every signal to stop that is not ignored: under nohup, or after a stop, it stays so."""
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(one) != signal.SIG_IGN:
            signal.signal(one, handler)


def command_module(command: str) -> ModuleType:
    """Import a command's module; ConfigError if this copy of the package does not have it."""
    if find_spec(f"pipeline.{command}") is None:
        raise ConfigError(f"{command}: this copy of the pipeline is without it; see: python -m pipeline --help")
    return import_module(f"pipeline.{command}")


def with_params(text: str, params: Path) -> str:
    """Add this experiment's --params to every command that the text names."""
    if params == Path("params.yaml"):
        return text
    return re.sub(r"(?<=run: )python -m pipeline \w+", lambda found: f"{found[0]} --params {shlex.quote(str(params))}", text)


def number(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers in a range, for argparse."""

    def read(text: str) -> int:
        if not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return read


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    whole = argparse.ArgumentParser(prog="python -m pipeline", description="Train image models with the same bits on any number of ranks.")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    each: dict[str, argparse.ArgumentParser] = {}
    for name, does in COMMANDS.items():
        each[name] = commands.add_parser(name, help=does, description=does[0].upper() + does[1:] + ".")
        each[name].add_argument(
            "--params", type=Path, default=Path("params.yaml"), help="the experiment; all paths are relative to its folder"
        )
    resume = "go on from this run's checkpoint; refused, with what differs, where it is another experiment (relative to the current folder)"
    each["train"].add_argument("--resume", type=Path, metavar="RUN", help=resume)
    stop = "stop behind epoch N, before the last, with a checkpoint and exit 75; the next start goes on, to the same bits"
    each["train"].add_argument("--stop-after-epochs", type=number(1, 10**6), metavar="N", help=stop)
    each["sweep"].add_argument("values", nargs="+", metavar="KEY=VALUE,VALUE", help="values to try, such as train.learning_rate=0.01,0.1")
    each["sweep"].add_argument("--factor", type=number(2, 100), default=2, help="one of so many goes on at each rung (default: 2)")
    result = "a receipt, a folder with one, or a run's folder (default: models/)"
    each["verify"].add_argument("result", nargs="?", type=Path, metavar="RESULT", help=result)
    each["verify"].add_argument("--all", action="store_true", dest="everything", help="every finished run in runs/")
    each["verify"].add_argument(
        "--world-size", type=number(1, 10000), metavar="N", help="on N ranks of this machine; at most one for each GPU"
    )
    each["verify"].add_argument("--from-step", type=number(0, 10**9), default=0, metavar="S", help="from the checkpoint of step S")
    each["verify"].add_argument("--steps", type=number(1, 10**9), metavar="K", help="K steps alone")
    named = "a run's folder (default: that whose journal was written last)"
    each["watch"].add_argument("result", nargs="?", type=Path, metavar="RUN", help=named)
    runs = "receipts, folders with one, runs' folders, or folders of runs (default: runs/)"
    each["compare"].add_argument("results", nargs="*", type=Path, metavar="RUN", help=runs)
    each["compare"].add_argument("--html", type=Path, metavar="FILE", help="where the page goes (default: compare.html beside params.yaml)")
    beside = "machines beside this one, or a range such as 1:3 (default: dist.nodes less one)"
    each["lead"].add_argument("--workers", metavar="N", help=beside)
    each["lead"].add_argument("--port", type=number(1, 65535), help="where workers join (default: 29400)")
    each["lead"].add_argument("--bind", metavar="ADDRESS", help="listen on this address alone (default: all; 127.0.0.1 without workers)")
    each["lead"].add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND…", help="what to run, with its own arguments")
    each["join"].add_argument("leader", metavar="HOST[:PORT]", help="where `lead` runs")
    each["doctor"].add_argument("--leader", metavar="HOST[:PORT]", help="also check that a leader answers there")
    each["doctor"].add_argument("--port", type=number(1, 65535), help="where this machine would lead (default: 29400)")
    return whole


def check_names(config: Config, params: Path) -> None:
    """ConfigError unless every name is in its catalogue; the catalogues import nothing that they list."""
    from pipeline import data, models, parallel

    try:
        data.check(config.data.name)
        models.check(config.model.name)
        parallel.check(config.dist)
        models.check_frozen(config.model.frozen, config.dist.strategy)
    except ConfigError as error:
        raise ConfigError(f"{params}: {error}") from None


if __name__ == "__main__":
    # A job in the background of a shell ignores Ctrl-C.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    with best_effort_output():
        code = main()
        # What comes while the last lines wait for their reader makes the wait short, and no other code.
        on_stop(lambda *_: wait_no_longer())
    on_stop(lambda *_: os._exit(code))
    # When Python clears its modules it has reset all handlers.
    atexit.register(on_stop, signal.SIG_IGN)
    sys.exit(code)
