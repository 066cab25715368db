"""One rank's process, seen from the process that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsync.verify._rank import AGAIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gradsync.verify._rank import Task

# Variables that torchrun sets for its own processes; the ranks that these start must not get them.
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Place(NamedTuple):
    """A rank that this process starts."""

    rank: int
    local_rank: int


class Child:
    """The process of one rank."""

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
    def start(cls, task: Task, place: Place, folder: Path, command: Sequence[str]) -> Child:
        """Start a rank with its part of the task."""
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
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def died_by_itself(self) -> bool:
        """Whether it ended by itself, with an exit code that means neither success nor a new start."""
        return not self.ended_by_us and self._process.poll() not in (None, 0, AGAIN)

    @property
    def silent_for(self) -> float:
        """Seconds since it last said anything."""
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
        """How it ended; if by itself, with the last lines of its log."""
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
