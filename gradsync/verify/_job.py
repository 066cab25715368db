"""Starts the ranks of one job, follows them through its cells, and starts new ranks after a cell that failed."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsync.verify._child import Child
from gradsync.verify._rank import GRACE, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradsync.verify._child import Place

    Wrong = list[tuple[int, str]]
    """What was wrong, by rank; empty if the promise holds."""

RANK = (sys.executable, "-m", "gradsync.verify._rank")
"""The program of a rank, which gets its task."""

_PAUSE = 0.05
_AFTER_A_DEATH = 1.0  # seconds in which the other ranks may end by themselves
_STARTING = 300.0  # seconds until the first cell: ranks import torch, and wait for ranks on other hosts


@dataclass
class Job:
    """Tries cells on `size` ranks; this process starts those in `mine`."""

    size: int
    is_joined: bool
    mine: Sequence[Place]
    cells: list[tuple[str, str]]
    device: str
    limit: float
    name: str
    meeting: str | None = None
    """The address where ranks of several processes meet; None if they are all of this process, and meet in a file."""
    command: Sequence[str] = RANK
    machine: dict[str, str] = field(default_factory=dict)
    """The device and the backend, once they are known."""

    def run(self, note: Callable[[tuple[str, str], Wrong], None]) -> None:
        """Try all cells; `note` gets each cell, and what was wrong."""
        start = 0
        while start < len(self.cells):
            start = self._attempt(start, note)

    def _attempt(self, start: int, note: Callable[[tuple[str, str], Wrong], None]) -> int:
        """Try cells from `start` up to the first that fails; return the number of the cell after it."""
        with tempfile.TemporaryDirectory(prefix="gradsync-verify-") as name:
            folder = Path(name)
            task = Task(
                0,
                self.size,
                self.is_joined,
                0,
                self.device,
                self.cells,
                start,
                self.limit,
                self.meeting or f"{folder}/store",
                self.name,
                "",
            )
            children = [Child.start(task, place, folder, self.command) for place in self.mine]
            try:
                return self._follow(children, start, note)
            finally:
                for child in children:
                    child.end()

    def _follow(self, children: list[Child], start: int, note: Callable[[tuple[str, str], Wrong], None]) -> int:
        heard = _Heard(start)
        while True:
            running = [child for child in children if child.is_running]
            for child in children:
                for line in child.lines():
                    self.machine |= {key: line[key] for key in ("device", "backend") if line.get(key)}
                    if heard.ends_a_cell(line):
                        note(self.cells[heard.done], [(rank, text) for rank, text in line["wrong"]])
            if not running:
                break
            self._end_silent(children, running)
            time.sleep(_PAUSE)
        died = [(child.place.rank, child.last_words()) for child in children if child.died_by_itself]
        died += [(child.place.rank, child.last_words()) for child in children if child.ended_by_us]
        if died and all(child.is_starting for child in children):
            heard.failed = heard.failed or died[0][1]
        if heard.failed is not None:
            for cell in self.cells[heard.done + 1 :]:
                note(cell, [(self.mine[0].rank, heard.failed)])
            return len(self.cells)
        if heard.done < heard.current:
            note(self.cells[heard.current], died or [(self.mine[0].rank, "its ranks ended without a word")])
        return heard.current + 1

    def _end_silent(self, children: list[Child], running: list[Child]) -> None:
        """End ranks that cannot get further: one of them has died, or they say nothing any more."""
        if any(child.died_by_itself for child in children):
            _wait(running, _AFTER_A_DEATH)
            for child in running:
                child.end()
        for child in running:
            if child.silent_for > (_STARTING if child.is_starting else 2 * (self.limit + 2 * GRACE)):
                child.end()


class _Heard:
    """How far the ranks of one attempt have come, from what they report."""

    def __init__(self, start: int) -> None:
        self.current = start  # the cell that is being tried
        self.done = start - 1  # the last cell whose outcome is known
        self.failed: str | None = None  # why no cell can be tried

    def ends_a_cell(self, line: dict[str, Any]) -> bool:
        """Read a line; return whether it is the first to tell how a cell ended."""
        self.failed = line.get("failed", self.failed)
        self.current = max(self.current, line.get("begins", self.current))
        number = line.get("cell", self.done)
        ends = number > self.done
        self.done = max(self.done, number)
        return bool(ends)


def _wait(children: Sequence[Child], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(child.is_running for child in children) and time.monotonic() < end:
        time.sleep(_PAUSE)
