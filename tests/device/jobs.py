"""Jobs on the fake device, as a test sees them."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.device.build import library, why_not
from tests.support.ranks import PATIENCE

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """One rank's process: its exit code, None if it had to be ended; what it printed; what its case returned."""

    returncode: int | None
    stdout: str
    stderr: str
    outcome: tuple[bool, object]


def run_on_device(case: Callable, *args: object, ranks: int = 2, limit: float = 120.0) -> list:
    """Run a function of a module on `ranks` new processes with the fake device; what they returned, by rank.

    Skips the test, with the reason, where the device cannot be built.
    """
    ended = job(case, *args, ranks=ranks, limit=limit)
    failed = [f"rank {r}:\n{one.outcome[1]}" for r, one in enumerate(ended) if not one.outcome[0]]
    assert not failed, f"{case.__qualname__}{args} failed on\n" + "\n".join(failed)
    return [one.outcome[1] for one in ended]


def job(
    case: Callable, *args: object, ranks: int = 2, limit: float = 60.0, joined: bool = True, **environment: str
) -> list[Ended]:
    """The same, with all that came of it; not `joined`, the ranks have no group but what the case makes."""
    need_device()
    with tempfile.TemporaryDirectory(prefix="gradsync-device-") as name:
        folder = Path(name)
        (folder / "case").write_bytes(pickle.dumps((case.__module__, case.__qualname__, args)))
        told = {"folder": name, "ranks": ranks, "limit": limit * PATIENCE, "joined": joined, "environment": environment}
        return [_ended(folder, rank, code) for rank, code in enumerate(_server.run(told))]


def _ended(folder: Path, rank: int, code: int | None) -> Ended:
    out, err = ((folder / f"{name}{rank}").read_text(errors="replace") for name in ("out", "err"))
    file = folder / f"outcome{rank}"
    if not file.exists():
        return Ended(code, out, err, (False, f"it {'hangs' if code is None else 'ended'} without a result\n{err[-3000:]}"))
    ok, value = pickle.loads(file.read_bytes())
    return Ended(code, out, err, (ok, value if ok else f"{value}\n{err[-3000:]}"))


def need_device() -> None:
    """Have the device built; skip the test, with the reason, where that cannot be."""
    if reason := why_not():
        import pytest

        pytest.skip(reason)
    library()


class _Server:
    """The process that forks the ranks; started with the first job, ended with the tests."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def run(self, told: dict) -> list[int | None]:
        if self._process is None:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.device.rank"],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            atexit.register(self._end)
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def _end(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


_server = _Server()
