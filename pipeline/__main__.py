"""The commands; a command's module is imported only when it runs."""

import argparse
import logging
import sys
from importlib import import_module
from pathlib import Path

from pipeline.config import Config, ConfigError, DataError, MachineError, load
from pipeline.files import Paths

COMMANDS = {
    "prepare": "find, check, split and pack the data set",
    "train": "train on all ranks, go on with a stopped training, or publish a finished one",
    "evaluate": "measure the published model on the test images",
    "sync": "bring MLflow up to date with the journals of all runs",
}


def main() -> int:
    """Run one command; every error a user can cause is one line and an exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipeline", description="Train image models with the same bits on any number of ranks.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, does in COMMANDS.items():
        command = commands.add_parser(name, help=does, description=does.capitalize() + ".")
        command.add_argument(
            "--params", type=Path, default=Path("params.yaml"), help="the experiment; all paths are relative to its folder"
        )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        config = load(arguments.params)
        check_names(config)
        code: int = import_module(f"pipeline.{arguments.command}").run(config, Paths(arguments.params))
    except (ConfigError, DataError, MachineError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(
            f"{error.filename or arguments.command}: {error.strerror or error}; see that there is room and a right to write",
            file=sys.stderr,
        )
        return MachineError.exit_code
    except KeyboardInterrupt:
        print("stopped; nothing half-written is left", file=sys.stderr)
        return 130
    return code


def check_names(config: Config) -> None:
    """ConfigError unless every name is in its catalogue; the catalogues import nothing that they list."""
    from pipeline import data, models, parallel

    data.check(config.data.name)
    models.check(config.model.name)
    parallel.check(config.dist.strategy)


if __name__ == "__main__":
    sys.exit(main())
