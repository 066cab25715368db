"""Starts the ranks of one job, follows them through its cells, and starts them again after a cell that failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsync.verify._rank import AGAIN, GRACE, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Wrong = list[tuple[int, str]]
    """What was off, by rank; empty where a promise holds."""

RANK = (sys.executable, "-m", "gradsync.verify._rank")
"""The program of a rank, which gets its task."""

_PAUSE = 0.05
_STARTING = 300.0  # seconds until the first cell: torch is imported, and ranks on other hosts are waited for
# What torchrun says to its own processes, and must not say to the ranks that these start.
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Place(NamedTuple):
    """A rank that this process starts."""

    rank: int
    local_rank: int


@dataclass
class Job:
    """Cells on a number of ranks, of which this process starts those in `mine`."""

    size: int
    mine: Sequence[Place]
    cells: list[tuple[str, str]]
    device: str
    limit: float
    name: str
    meeting: str | None = None
    """Where ranks of several processes meet; one process's own meet in a file."""
    command: Sequence[str] = RANK
    machine: dict[str, str] = field(default_factory=dict)
    """The device and the backend, once they are known."""

    def run(self, note: Callable[[tuple[str, str], Wrong], None]) -> None:
        """Try all cells; `note` gets each one, and what was off."""
        start = 0
        while start < len(self.cells):
            start = self._attempt(start, note)

    def _attempt(self, start: int, note: Callable[[tuple[str, str], Wrong], None]) -> int:
        """From one cell on, up to the first that fails; returns the one after it."""
        with tempfile.TemporaryDirectory(prefix="gradsync-verify-") as name:
            folder = Path(name)
            task = Task(
                0,
                self.size,
                0,
                self.device,
                self.cells,
                start,
                self.limit,
                self.meeting or f"{folder}/store",
                self.name,
                "",
            )
            children = [_Child.start(task, place, folder, self.command) for place in self.mine]
            try:
                return self._follow(children, start, note)
            finally:
                for child in children:
                    child.end()

    def _follow(self, children: list[_Child], start: int, note: Callable[[tuple[str, str], Wrong], None]) -> int:
        current, done = start, start - 1
        failed: str | None = None
        while True:
            running = [child for child in children if child.is_running]
            for child in children:
                for line in child.lines():
                    failed = line.get("failed", failed)
                    self.machine |= {key: line[key] for key in ("device", "backend") if line.get(key)}
                    current = max(current, line.get("begins", current))
                    number = line.get("cell", done)
                    if number > done:
                        done = number
                        note(self.cells[number], [(rank, text) for rank, text in line["wrong"]])
            if not running:
                break
            if any(child.died_by_itself for child in children):
                _wait(running, GRACE)
                for child in running:
                    child.end()
            for child in running:
                if child.silent_for > (_STARTING if child.is_starting else 2 * (self.limit + 2 * GRACE)):
                    child.end()
            time.sleep(_PAUSE)
        died = [(child.place.rank, child.last_words()) for child in children if child.died_by_itself]
        died += [(child.place.rank, child.last_words()) for child in children if child.ended_by_us]
        if failed is None and died and all(child.is_starting for child in children):
            failed = died[0][1]
        if failed is not None:
            for cell in self.cells[done + 1 :]:
                note(cell, [(self.mine[0].rank, failed)])
            return len(self.cells)
        if done < current or done < start:
            note(self.cells[current], died or [(self.mine[0].rank, "its ranks ended without a word")])
        return max(current, done) + 1


class _Child:
    """One rank's process."""

    def __init__(self, place: Place, process: subprocess.Popen[bytes], said: Path, log: Path) -> None:
        self.place = place
        self._process = process
        self._said = said
        self._log = log
        self._read = 0
        self._heard = time.monotonic()
        self.is_starting = True
        self.ended_by_us = False

    @classmethod
    def start(cls, task: Task, place: Place, folder: Path, command: Sequence[str]) -> _Child:
        said, log = folder / f"said{place.rank}", folder / f"log{place.rank}"
        said.touch()
        mine = replace(task, rank=place.rank, local_rank=place.local_rank, said=str(said))
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in _OF_TORCHRUN and not key.startswith("TORCHELASTIC")
        }
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - this Python, on a module of our own
                (*command, mine.dump()),
                env={"OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.PIPE,  # held open: a rank ends when it closes
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends its ranks
            )
        return cls(place, process, said, log)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def died_by_itself(self) -> bool:
        """Whether it ended without a word of how its cell ended."""
        return not self.ended_by_us and self._process.poll() not in (None, 0, AGAIN)

    @property
    def silent_for(self) -> float:
        return time.monotonic() - self._heard

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it has said since the last look."""
        with self._said.open() as said:
            said.seek(self._read)
            whole, _, _ = said.read().rpartition("\n")
        if not whole:
            return
        self._read += len(whole.encode()) + 1
        self._heard = time.monotonic()
        for line in whole.splitlines():
            told: dict[str, Any] = json.loads(line)
            self.is_starting = self.is_starting and "begins" not in told
            yield told

    def last_words(self) -> str:
        """How it ended, where it did so by itself."""
        if self.ended_by_us:
            return "it said nothing any more, and was ended"
        code = self._process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return "\n".join([f"its process {how}", *self._log.read_text(errors="replace").splitlines()[-10:]])

    def end(self) -> None:
        """End the process, if it is still there."""
        if self.is_running:
            self.ended_by_us = True
            with suppress(ProcessLookupError, PermissionError):  # ended just now
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def _wait(children: Sequence[_Child], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(child.is_running for child in children) and time.monotonic() < end:
        time.sleep(_PAUSE)
