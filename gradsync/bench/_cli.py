"""The command from its arguments to its output."""

import json
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch

from gradsync.bench import _hosts, _rank
from gradsync.bench._arguments import parser
from gradsync.bench._errors import BenchError
from gradsync.bench._launch import launch
from gradsync.bench._plan import plan, under_torchrun
from gradsync.bench._plot import plot
from gradsync.bench._progress import Progress
from gradsync.bench._records import Measured, Options, Place
from gradsync.bench._report import report
from gradsync.bench._summary import Summary, summarise


def main(arguments: Sequence[str]) -> int:
    """Run the bench with these arguments; the exit code is 0, or 1 with a sentence about what went wrong."""
    given = parser().parse_args(arguments)
    try:
        options, places = plan(given)
    except BenchError as error:
        parser().error(str(error))
    progress = Progress()
    try:
        with ending_on_signals():
            groups = _measure(options, places, progress)
    except BenchError as error:
        progress.close()
        sys.stderr.write(f"gradsync bench: {error}\n")
        return 1
    finally:
        progress.close()
    if groups:
        command = shlex.join(("python", "-m", "gradsync", "bench", *arguments))
        _show(summarise(options, command, groups), given.json, given.plot)
    return 0


def _measure(options: Options, places: Sequence[Place], progress: Progress) -> list[Measured]:
    """Collect what each place's ranks have measured; nothing on torchrun's later ranks."""
    if under_torchrun():
        measured = _rank.run(options, places[0], progress)
        return [] if measured is None else [measured]
    # All rows of a table use the same kind of device, and namespaces do not separate the GPUs of one machine.
    gpus = not any(place.link for place in places) and torch.accelerator.device_count() >= places[0].ranks
    groups = []
    for place in places:
        progress(f"{place.name}: starting {place.ranks} ranks")
        if place.link:
            with _hosts.two_hosts(place.link) as hosts:
                groups.append(launch(options, place, hosts, progress, gpus=False))
        else:
            groups.append(launch(options, place, (), progress, gpus=gpus))
    return groups


def _show(summary: Summary, json_file: str | None, picture: Path | None) -> None:
    text = json.dumps(asdict(summary), indent=1) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    else:
        sys.stdout.write(report(summary) + "\n")
        if json_file is not None:
            Path(json_file).write_text(text)
    if picture is not None:
        plot(summary, picture)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let Ctrl-C, a kill or a closed terminal end this process like an exception; a second signal is ignored."""
    names = "SIGINT", "SIGTERM", "SIGHUP"
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]

    def end(number: int, _frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
