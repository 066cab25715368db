"""`python -m gradsync verify`, from its arguments to its exit code."""

from __future__ import annotations

import os
import platform
import sys
import time
from typing import TYPE_CHECKING

import torch

from gradsync.launch.device import default_backend
from gradsync.verify._arguments import parse
from gradsync.verify._child import Place
from gradsync.verify._job import RANK, Job
from gradsync.verify._meeting import Meeting
from gradsync.verify._report import Ranks, Report, Tried, as_json, as_markdown, as_text
from gradsync.verify.homes import HOMES
from gradsync.verify.table import CELLS, ROWS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from gradsync.verify._job import Wrong


def main(argv: Sequence[str], command: Sequence[str] = RANK) -> int:
    """Try what the arguments ask for, print the table, and return the exit code; `command` starts a rank."""
    options = parse(argv)
    meeting = Meeting.of_torchrun()
    report = Report([name for name in ROWS if not options.promise or name in options.promise])
    shown = _Progress()
    try:
        for ranks, asked in _engines(options, meeting).items():
            whys = {engine: _why_not(options, meeting, ranks, engine) for engine in asked}
            report.left_out |= {engine: why for engine, why in whys.items() if why is not None}
            engines = [engine for engine, why in whys.items() if why is None]
            cells = [(engine, row) for engine in engines for row in report.rows if CELLS[engine, row].why_not is None]
            several = meeting is not None and ranks.num > 1
            job = Job(
                ranks.num,
                ranks.is_joined,
                [meeting.place] if meeting is not None and several else [Place(r, r) for r in range(ranks.num)],
                cells,
                options.device,
                options.limit,
                f"{'' if meeting is None else meeting.attempt}/{ranks.num}",
                meeting.address if meeting is not None and several else None,
                command,
            )
            report.engines |= dict.fromkeys(engines, ranks)
            if meeting is None or several or meeting.place.rank == 0:
                shown.begin(len(cells), ranks)

                def note(cell: tuple[str, str], wrong: Wrong) -> None:
                    report.tried[cell] = Tried(wrong)
                    shown.one(cell, wrong)

                job.run(note)
                report.machines[ranks] = job.machine
    finally:
        shown.end()
        if meeting is not None:
            meeting.leave()
    if meeting is None or meeting.place.rank == 0:
        facts = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.platform()}
        form = as_json if options.json else as_markdown if options.markdown else as_text
        sys.stdout.write(form(report, facts) + "\n")
    return 0 if report.holds else 1


def _engines(options: argparse.Namespace, meeting: Meeting | None) -> dict[Ranks, list[str]]:
    """The engines to try, by the number of ranks."""
    several = _num_ranks(options) if meeting is None else meeting.size
    found: dict[Ranks, list[str]] = {}
    for name, column in HOMES.items():
        ranks = Ranks(1, is_joined=False) if column.ranks == 1 else Ranks(several)
        asked = name in options.engine if options.engine else options.full or not column.is_variant
        if not _under_torchrun() and column.ranks > max(2, several):
            ranks = Ranks(column.ranks)  # more processes can be started here, but they take longer
            asked = asked and (options.full or bool(options.engine))
        if asked:
            found.setdefault(ranks, []).append(name)
    return found


def _under_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def _num_ranks(options: argparse.Namespace) -> int:
    """How many ranks this process starts by itself: two if there is a device for each, unless told."""
    if _under_torchrun():
        return 1
    if options.ranks is not None:
        return int(options.ranks)
    return 2 if options.device == "cpu" or default_backend() == "gloo" else min(2, torch.accelerator.device_count())


def _why_not(options: argparse.Namespace, meeting: Meeting | None, ranks: Ranks, engine: str) -> str | None:
    """Why an engine cannot be tried on these ranks."""
    needed = HOMES[engine].ranks
    if needed > 2 and ranks.num < needed:
        return f"it needs {needed} ranks, and there are {ranks.num}"
    if needed == 4 and ranks.num % 2:
        return f"it needs an even number of ranks, and there are {ranks.num}"
    if ranks.num == 1 or meeting is not None or options.device == "cpu" or not torch.accelerator.is_available():
        return None
    count, kind = torch.accelerator.device_count(), torch.accelerator.current_accelerator()
    if default_backend() == "gloo" or count >= ranks.num:
        return None
    return f"it needs {ranks.num} devices, and this machine has {count} ({kind}); --device cpu tries it on the CPU"


class _Progress:
    """Shows what is being tried on stderr; if that is no terminal, a line for each engine."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = os.environ.get("RANK", "0") == "0"
        self._num = self._all = self._num_wrong = 0
        self._start = time.monotonic()
        self._engine = ""

    def begin(self, num: int, ranks: Ranks) -> None:
        self._all += num
        self._write(f"{num} cells on {ranks}")

    def one(self, cell: tuple[str, str], wrong: Wrong) -> None:
        self._num += 1
        engine, row = cell
        if wrong:
            self._num_wrong += 1
            self._write(f"✗ {HOMES[engine].title}: {ROWS[row].title}")
        if self._is_terminal:
            self._write(f"{self._num}/{self._all} {HOMES[engine].title}: {ROWS[row].title}", stays=False)
        elif engine != self._engine:
            self._write(f"{HOMES[engine].title} ({time.monotonic() - self._start:.0f} s)")
        self._engine = engine

    def end(self) -> None:
        self._write(f"{self._num - self._num_wrong} of {self._num} hold, {time.monotonic() - self._start:.0f} s")

    def _write(self, text: str, *, stays: bool = True) -> None:
        if self._is_shown:
            clear = "\r\x1b[K" if self._is_terminal else ""
            sys.stderr.write(f"{clear}{text}{chr(10) if stays else ''}")
            sys.stderr.flush()
