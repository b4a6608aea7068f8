"""What benches share of their command lines: the parts that are named, all of them where none is; and how many rounds."""

import argparse
from collections.abc import Iterable


def add_parts(parser: argparse.ArgumentParser, known: Iterable[str], metavar: str = "PART") -> None:
    """Add the names of parts: argparse's own choices would refuse that none is named."""
    names = list(known)

    def named(word: str) -> str:
        if word not in names:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(names)}")
        return word

    parser.add_argument("parts", nargs="*", type=named, default=names, metavar=metavar, help=f"of {', '.join(names)}; all if none is named")


def at_least_one(word: str) -> int:
    """A number of rounds: of none there is no median."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number
