"""What `python -m gradsync verify` takes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gradsync.verify.homes import HOMES
from gradsync.verify.table import ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments as attributes; exits with 2 for wrong ones."""
    parser = argparse.ArgumentParser(
        prog="python -m gradsync verify",
        description="Tries gradsync's promises on each engine, on the devices, the backend and the torch of this "
        "machine, and compares the parameters after each update with one big batch in float64. It starts its ranks by "
        "itself; under torchrun (`torchrun ... -m gradsync verify`) it has one for each of torchrun's. The exit code "
        "is 0 if all promises hold, else 1.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="engines:\n"
        + _listed({name: column.title for name, column in HOMES.items()})
        + "\n\npromises:\n"
        # argparse does not format an epilog, so a % needs no escape
        + _listed({name: row.title for name, row in ROWS.items()}),
    )
    parser.add_argument("--full", action="store_true", help="variants of engines too, and those that need 4 ranks")
    parser.add_argument(
        "--engine", action="append", choices=list(HOMES), metavar="NAME", help="this one; several may come"
    )
    parser.add_argument(
        "--promise", action="append", choices=list(ROWS), metavar="NAME", help="this one; several may come"
    )
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto", help="auto: this machine's accelerator")
    parser.add_argument("--ranks", type=_ranks, help="to start on this machine (2; 1 where one device is all there is)")
    parser.add_argument("--limit", type=_seconds, default=20.0, help="seconds until a cell counts as hanging (20)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    how.add_argument("--markdown", action="store_true", help="print the table in Markdown, as the documentation has it")
    return parser.parse_args(arguments)


def _listed(names: Mapping[str, str]) -> str:
    width = max(map(len, names))
    return "\n".join(f"  {name:<{width}}  {title}" for name, title in names.items())


def _ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of ranks from 1 on is needed, but {text!r} came")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"a number of seconds is needed, but {text!r} came")
    return seconds
