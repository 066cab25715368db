"""One rank: tries cells with the others, one after another, and ends at the first that fails. `_job` starts a new one.

After a failure, the process group may be broken. So ranks use a store of their own to tell each other how a cell ended,
and all of them go on with the same cell. A rank that hangs tells where it stands.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

AGAIN = 75  # exit code: start the ranks again, after the cell that failed
GRACE = 5.0  # seconds by which ranks may be apart
_STARTING = 300.0  # seconds for all ranks to be there


@dataclass(frozen=True)
class Task:
    """The task of one rank: its place, the cells from `start` on, and where ranks meet.

    `is_joined` says whether there is a process group; one rank alone may have none, as under a plain python.
    `meeting` is a file, or "host:port" of torchrun's store; `name` is the attempt's prefix in it.
    """

    rank: int
    size: int
    is_joined: bool
    local_rank: int
    device: str
    cells: list[tuple[str, str]]
    start: int
    limit: float
    meeting: str
    name: str
    said: str
    """The file in which this rank reports its progress, one JSON object on each line."""

    def dump(self) -> str:
        """As an argument of this program."""
        return json.dumps(asdict(self))


def main(task: Task) -> None:
    """Try the cells; ends the process."""
    threading.Thread(target=_end_with_whoever_started_this, daemon=True).start()
    warnings.simplefilter("ignore")
    with Path(task.said).open("a", buffering=1) as said:

        def say(**what: Any) -> None:
            said.write(json.dumps(what) + "\n")

        try:
            rank = Rank(task)
        except Exception as error:  # noqa: BLE001 - whatever it is, no cell can be tried
            say(failed=f"{type(error).__name__}: {error}")
            _leave(1)
            return
        say(device=str(rank.device), backend=rank.backend)
        for number in range(task.start, len(task.cells)):
            say(begins=number)
            wrong = rank.try_cell(number, say)
            say(cell=number, wrong=wrong)
            if wrong:
                _leave(AGAIN)
    _leave(0)


class Rank:
    """This process among the others."""

    def __init__(self, task: Task) -> None:
        import torch
        import torch.distributed as dist

        from gradsync.launch.device import default_backend, device_of
        from gradsync.verify import table

        self._table = table  # imported before the time of a cell begins
        if any("fsdp" in engine or "hsdp" in engine for engine, _ in task.cells):
            import torch.distributed.fsdp  # for the same reason
        torch.set_num_threads(1)
        self._task = task
        self._lock = threading.Lock()
        self._told = -1  # the last cell whose outcome this rank has reported
        backend = "gloo" if task.device == "cpu" else default_backend()
        self.backend = backend if task.is_joined else None
        self.device: torch.device = (
            torch.device("cpu") if task.device == "cpu" else device_of(task.local_rank, self.backend)
        )
        if self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)
        if task.is_joined:
            limit = timedelta(seconds=max(60.0, 2 * task.limit))
            dist.init_process_group(
                backend, store=_store(task, "group"), rank=task.rank, world_size=task.size, timeout=limit
            )
            self._store = _store(task, "outcomes")

    def try_cell(self, number: int, say: Any) -> list[tuple[int, str]]:
        """What was wrong, by rank; empty if the promise holds on all ranks."""
        import torch

        watchdog = threading.Timer(self._task.limit, self._hangs, (number, threading.get_ident(), say))
        watchdog.daemon = True
        watchdog.start()
        engine, row = self._task.cells[number]
        torch.manual_seed(0)
        try:
            self._table.try_cell(engine, self._table.CELLS[engine, row], self.device)
            outcome = ""
        except Exception as error:  # noqa: BLE001 - all that goes wrong is the cell's
            outcome = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        watchdog.cancel()
        with self._lock:
            if self._told == number:
                time.sleep(2 * GRACE + self._task.limit)  # the watchdog was first: it ends the process
            self._told = number
        return self._exchange(number, outcome)

    def _hangs(self, number: int, thread: int, say: Any) -> None:
        with self._lock:
            if self._told == number:
                return
            self._told = number
        outcome = f"it hangs: it had not ended after {self._task.limit:g} s, and stood at {_place_of(thread)}"
        say(cell=number, wrong=self._exchange(number, outcome))
        _leave(AGAIN)

    def _exchange(self, number: int, outcome: str) -> list[tuple[int, str]]:
        """Exchange with the other ranks how a cell ended."""
        task = self._task
        if task.size == 1:
            return [(0, outcome)] if outcome else []
        self._store.set(f"{number}/{task.rank}", outcome)
        end, wrong = time.monotonic() + task.limit + GRACE, []
        for rank in range(task.size):
            key = f"{number}/{rank}"
            while not self._store.check([key]) and time.monotonic() < end:
                time.sleep(0.001)
            told = self._store.get(key).decode() if self._store.check([key]) else "nothing came from this rank any more"
            if told:
                wrong.append((rank, told))
        return wrong


def _store(task: Task, what: str) -> Any:
    """A store for the ranks of this attempt."""
    import torch.distributed as dist

    host, _, port = task.meeting.rpartition(":")
    limit = timedelta(seconds=_STARTING)
    if port.isdigit():
        store: Any = dist.TCPStore(host, int(port), is_master=False, timeout=limit)  # type: ignore[attr-defined]
    else:
        store = dist.FileStore(f"{task.meeting}-{what}-{task.start}", task.size)  # type: ignore[attr-defined]
        store.set_timeout(limit)
    return dist.PrefixStore(f"{task.name}/{task.start}/{what}", store)  # type: ignore[attr-defined]


def _place_of(thread: int) -> str:
    """The innermost lines of a thread, without those inside torch."""
    frame = sys._current_frames().get(thread)
    lines = traceback.extract_stack(frame) if frame is not None else []
    ours = [line for line in lines if f"{os.sep}torch{os.sep}" not in line.filename]
    return " < ".join(f"{Path(line.filename).name}:{line.lineno} {line.name}" for line in reversed(ours[-4:]))


def _end_with_whoever_started_this() -> None:
    # Standard input is a pipe. It closes when the process that started this one ends, for whatever reason.
    os.read(0, 1)
    os._exit(1)


def _leave(code: int) -> None:
    # The process group is not destroyed, because it may be broken. A new process comes next.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
