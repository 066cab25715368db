"""The command line, as `--help` shows it."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gradsync.bench._models import OPTIMIZERS, SIZES
from gradsync.bench._ways import WAYS

T = TypeVar("T")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m gradsync bench",
        description="Seconds per optimizer step of every way to accumulate gradients, measured side by side on your "
        "machines; how far each is from what the link allows, and how long windows should be.",
        epilog="On a cluster: torchrun --nnodes 2 ... -m gradsync bench. How a --factory is written: "
        "python -c 'import gradsync.bench; help(gradsync.bench)'.",
    )
    what = made.add_argument_group("what is trained")
    what.add_argument("--model", choices=sorted(SIZES), help="default: mlp")
    what.add_argument("--factory", metavar="MODULE:FUNCTION", help="a model of your own, instead of --model")
    for size in ("width", "depth", "heads", "length", "vocab"):
        users = [f"{model} {sizes[size]}" for model, sizes in SIZES.items() if size in sizes]
        what.add_argument(f"--{size}", type=_positive, metavar="INT", help=f"defaults: {', '.join(users)}")
    batches = ", ".join(f"{model} {sizes['batch']}" for model, sizes in SIZES.items())
    what.add_argument(
        "--batch", type=_positive, metavar="INT", help=f"of one micro-batch; defaults: {batches}, factory 16"
    )
    what.add_argument(
        "--optimizer",
        choices=sorted(OPTIMIZERS),
        help="default: sgd; adamw is the fused one; a factory's own needs none",
    )
    what.add_argument(
        "--steps", type=_list(_positive), default=(4,), metavar="N,N,...", help="micro-batches in a window; default: 4"
    )
    what.add_argument(
        "--ways", type=_list(_way), metavar="WAY,...", help=f"of {', '.join(WAYS)}; no_sync and compute always"
    )
    where = made.add_argument_group("where (not under torchrun, which has decided it)")
    where.add_argument(
        "--ranks", type=_positive, metavar="INT", help="on this machine 2, on each emulated host 1, unless told"
    )
    where.add_argument(
        "--hosts", type=int, choices=(2,), help="emulate two hosts on this machine's CPU (Linux, root, iproute2)"
    )
    where.add_argument("--link", metavar="RATE", help="between the emulated hosts, as tc writes it; default: 1gbit")
    where.add_argument("--links", type=_list(str), metavar="RATE,...", help="several rates, one after the other")
    where.add_argument(
        "--threads", type=_positive, default=1, metavar="INT", help="of each rank's CPU work; default: 1"
    )
    how = made.add_argument_group("how long")
    how.add_argument(
        "--rounds", type=_at_least_3, default=9, metavar="INT", help="at most so many, each with every way; default: 9"
    )
    how.add_argument(
        "--seconds",
        type=_seconds,
        default=45.0,
        metavar="SECONDS",
        help="fewer rounds (3 at least) if they take longer; default: 45",
    )
    how.add_argument(
        "--limit", type=_seconds, default=900.0, metavar="SECONDS", help="end ranks that take longer; default: 900"
    )
    out = made.add_argument_group("output beside the table")
    out.add_argument(
        "--json", metavar="FILE", help="everything that was measured; - for standard output, without the table"
    )
    out.add_argument("--plot", type=Path, metavar="PNG", help="a picture (needs matplotlib)")
    return made


def _positive(text: str) -> int:
    return _at_least(1, text)


def _at_least_3(text: str) -> int:
    return _at_least(3, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"it must be a whole number of at least {least}; it came as {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"it must be a number of seconds above 0; it came as {text!r}")
    return seconds


def _way(text: str) -> str:
    if text not in WAYS:
        raise argparse.ArgumentTypeError(f"there is no way named {text!r}; there are {', '.join(WAYS)}")
    return text


def _list(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    return lambda text: tuple(kind(part.strip()) for part in text.split(","))
