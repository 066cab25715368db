"""A device to test on: named `cuda`, with the host's memory, the CPU's kernels and gloo's collectives, and true numbers.

    [result, _] = run_on_device(case, ranks=2)          # `case` is a function of a module, run in fresh processes

In a case, tensors and models go `.to("cuda")`; `with waits() as found:` counts whatever would make the host wait for a
real device, as (operation, place in gradsync); `tests.device.fake.races()` names uses of the same memory by streams
that are in no order. The ranks are joined by the backend `likenccl`, which refuses tensors of the CPU as nccl does; one
rank alone has no process group. It shows no true asynchrony, and no error of nccl's.

`source/` is the device in C++, `build` compiles it, `fake` installs it, `rank` is one process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.device.build import library, why_not
from tests.device.waits import waits

__all__ = ["need_device", "run_on_device", "start", "waits"]

ROOT = Path(__file__).parents[2]


def run_on_device(case: Callable, *args: object, ranks: int = 2, limit: float = 120.0) -> list:
    """Run a function of a module on `ranks` new processes with the fake device; what they returned, by rank.

    Skips the test, with the reason, where the device cannot be built.
    """
    need_device()
    with tempfile.TemporaryDirectory(prefix="gradsync-device-") as name:
        folder = Path(name)
        (folder / "case").write_bytes(pickle.dumps((case.__module__, case.__qualname__, args, ranks)))
        commands = [["-m", "tests.device.rank", str(folder), str(rank)] for rank in range(ranks)]
        printed = start(commands, limit=limit)
        outcomes = [_outcome(folder / f"outcome{rank}", printed[rank]) for rank in range(ranks)]
    failed = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(outcomes) if not ok]
    assert not failed, f"{case.__qualname__}{args} failed on\n" + "\n".join(failed)
    return [value for _, value in outcomes]


def _outcome(file: Path, printed: subprocess.CompletedProcess) -> tuple[bool, object]:
    if file.exists():
        ok, value = pickle.loads(file.read_bytes())
        return ok, value if ok else f"{value}\n{printed.stderr[-3000:]}"
    return False, f"it {'hangs' if printed.returncode is None else 'ended'} without a result\n{printed.stderr[-3000:]}"


def need_device() -> None:
    """Have the device built; skip the test, with the reason, where that cannot be."""
    if reason := why_not():
        import pytest

        pytest.skip(reason)
    library()


def start(commands: list[list[str]], *, limit: float, **environment: str) -> list[subprocess.CompletedProcess]:
    """Run Python with these arguments, all at once, as the ranks of one job; what they printed.

    Processes that are still there after `limit` seconds are ended, and have None for a return code.
    """
    told = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    with tempfile.TemporaryDirectory(prefix="gradsync-device-") as name:
        files = [(Path(name) / f"out{i}", Path(name) / f"err{i}") for i in range(len(commands))]
        running = []
        for i, (command, (out, err)) in enumerate(zip(commands, files, strict=True)):
            env = {**told, "RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": str(len(commands))}
            with open(out, "wb") as stdout, open(err, "wb") as stderr:
                running.append(subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stdout=stdout, stderr=stderr))
        end = time.monotonic() + limit
        codes = []
        for process in running:
            try:
                codes.append(process.wait(max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
        texts = [(out.read_text(errors="replace"), err.read_text(errors="replace")) for out, err in files]
    return [subprocess.CompletedProcess(c, code, *text) for c, code, text in zip(commands, codes, texts, strict=True)]
