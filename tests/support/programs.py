"""Programs as a user starts them, each in a process of its own, without the seconds that torch takes to be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.ranks import PATIENCE

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
# torchrun with its ranks forked from it; a script and its options follow.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--start-method", "fork", "--run-path"]


class Ended(NamedTuple):
    code: int
    printed: str
    complaints: str


class Program:
    """One that runs; it is killed after `limit` seconds, many times what it takes where nothing else runs."""

    def __init__(self, command: Sequence[str], folder: Path, limit: float) -> None:
        self.title, self.limit, self._folder = " ".join(command), limit, folder
        self._end = time.monotonic() + limit + 60

    def ended(self) -> Ended:
        """How it ended; waits for that."""
        code = self._folder / "code"
        while not code.exists():
            assert time.monotonic() < self._end, f"{self.title} was started by nobody"
            time.sleep(0.02)
        printed, complaints = ((self._folder / name).read_text(encoding="utf-8") for name in ("out", "err"))
        assert code.read_text() != "HANG", f"HANG: {self.title} ran for {self.limit} s:\n{printed[-3000:]}\n{complaints[-3000:]}"
        return Ended(int(code.read_text()), printed, complaints)

    @property
    def waiter(self) -> int:
        """The process that waits for it."""
        return int((self._folder / "pid").read_text())


class Programs:
    """Starts them; `enter` are words in front of a command, such as those of a network namespace."""

    def __init__(self, enter: Sequence[str] = (), environment: Mapping[str, str] = ENVIRONMENT) -> None:
        self._enter, self._environment = enter, environment
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="gradsync-programs-")

    def start(
        self, *command: str, limit: float = 60, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
    ) -> Program:
        """`script options...` or `-m module options...`."""
        if self._process is None:
            self._process = subprocess.Popen(
                [*self._enter, sys.executable, "-m", "tests.support.starter"],
                cwd=ROOT, env={**self._environment, "PYTHONIOENCODING": "utf-8"}, stdin=subprocess.PIPE, text=True,
            )  # fmt: skip
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        job = {
            "command": command, "folder": str(folder), "limit": limit * PATIENCE, "cwd": str(cwd),
            "environment": {**self._environment, **(environment or {})},
        }  # fmt: skip
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Program(command, folder, limit * PATIENCE)

    def run(self, *command: str, **options) -> Ended:
        return self.start(*command, **options).ended()

    @property
    def starter(self) -> int | None:
        """The process that they are forked from."""
        return self._process and self._process.pid

    def stop(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.kill()  # rather than wait until Python has taken torch apart
            self._process.wait()
            self._process = None
        self._folder.cleanup()
