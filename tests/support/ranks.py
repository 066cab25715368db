"""Real ranks for the tests: processes that are started once, joined by gloo, and given one case after another.

A case is a module-level function; it runs on every rank at once, and its return values come back in the order of ranks.
Each case has a time limit: a hang ends the ranks and fails the test.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

# By what limits are multiplied, for a machine that is busy; beside another of pytest's workers it always is.
_ALONE = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"
PATIENCE = float(os.environ.get("GRADSYNC_PATIENCE", "1" if _ALONE else "3"))
TIME_LIMIT = 60.0  # seconds a case may take
GROUP_TIMEOUT = timedelta(seconds=40 * PATIENCE)  # shorter, so that a rank can say what it waited for

# Imported once, before the ranks are forked: the first optimizer brings in torch._dynamo, which takes seconds.
PRELOADED = ["torch", "torch.distributed.fsdp", "torch._dynamo", "gradsync", "tests.support.ranks"]


NOT_CONNECTED = "Gloo connectFullMesh failed"  # in `init_process_group` or `new_group`
CRASHES = ("Fatal Python error: Segmentation fault", "Fatal Python error: Aborted")
MISMATCH = "Is there a distributed collective mismatch"  # gloo ends the process, too, and it is not gloo's fault


class GlooError(Exception):
    """gloo could not connect the ranks, or one of its threads has crashed; the text has the traceback."""


class RankError(AssertionError):
    """A case failed on some rank; the text has that rank's traceback."""


class Ranks:
    """`size` processes in one gloo group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._init = ""  # the file that they find each other by
        self._processes: list = []
        self._pipes: list = []
        self._seconds: list[float] = []  # how long each rank took for the last case

    def run(self, case: Callable, *args: object, limit: float = TIME_LIMIT) -> list:
        """Run a function on every rank; what they returned."""
        results = self.outcomes(case, *args, limit=limit)
        failed = [rank for rank, (ok, _) in enumerate(results) if not ok]
        failed.sort(key=lambda rank: self._seconds[rank], reverse=True)  # who failed first is read last
        if failed:
            said = (f"rank {rank}, after {self._seconds[rank]:.1f} s:\n{results[rank][1]}" for rank in failed)
            raise RankError(f"{case.__module__}.{case.__qualname__}{args} failed on\n" + "\n".join(said))
        return [value for _, value in results]

    def outcomes(self, case: Callable, *args: object, limit: float = TIME_LIMIT) -> list:
        """The same, with (True, value) or (False, traceback) a rank.

        Now and then gloo itself fails, outside of any code of ours. Then new ranks begin the case anew, once, with new
        files in place of the stores that were given, and a warning tells what happened.
        """
        try:
            return self._outcomes(case, *args, limit=limit)
        except GlooError as error:
            warnings.warn(f"gloo failed, and the ranks began anew: {error}", stacklevel=2)
        for store in _files(args):
            os.remove(store)
        return self._outcomes(case, *args, limit=limit, again=True)

    def _outcomes(self, case: Callable, *args: object, limit: float, again: bool = False) -> list:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((case, args)))
        start = time.monotonic()
        results, waiting = {}, dict(zip(self._pipes, range(self.size), strict=True))
        self._seconds = [math.inf] * self.size
        while waiting and (there := wait([*waiting], max(0.0, start + limit * PATIENCE - time.monotonic()))):
            for pipe in there:
                rank = waiting.pop(pipe)
                self._seconds[rank] = time.monotonic() - start
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self._processes[rank].join(1)  # or its exit code is not known yet
                    ended = f"the process ended, exit code {self._processes[rank].exitcode}"
                    results[rank] = False, f"{ended}\n{_said(self._init, rank).read_text()}"
                if not again and _is_of_gloo(*results[rank]):
                    self.stop()
                    raise GlooError(results[rank][1])
        for rank in waiting.values():
            results[rank] = False, f"HANG: nothing in {limit * PATIENCE} s. It is at:\n{self._where_is(rank)}"
        results = [results[rank] for rank in range(self.size)]
        if not all(ok for ok, _ in results):
            self.stop()  # whatever is left half done must not reach the next case
        return results

    def _where_is(self, rank: int) -> str:
        """What a rank that does not answer is running, in all its threads."""
        with suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)
        return _said(self._init, rank).read_text()

    def stop(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._init = os.path.join(tempfile.mkdtemp(prefix="gradsync-ranks-"), "store")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self._init, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)


def _said(init: str, rank: int) -> Path:
    """The file with a rank's stderr: what C++ says as it ends the process, and the stacks, if asked for or in a crash."""
    return Path(f"{init}.{rank}.stderr")


def _is_of_gloo(ok: bool, value: object) -> bool:
    """Whether gloo has failed, outside of any code of ours.

    It crashed four times that we know of, in a thread `pt_gloo_runloop` (torch 2.11 and 2.13). In a thread
    that runs no Python there is no "current thread" for Python to show.
    """
    text = "" if ok else str(value)
    crashed = any(crash in text for crash in CRASHES) and "Current thread" not in text
    return NOT_CONNECTED in text or (crashed and MISMATCH not in text)


def _files(args: object) -> list[str]:
    """The files that are named in these arguments."""
    if isinstance(args, list | tuple):
        return [path for one in args for path in _files(one)]
    return [args] if isinstance(args, str) and os.path.isfile(args) else []


def _serve(rank: int, size: int, init: str, pipe) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # what was imported is there for ever: collections pass it over, and its pages stay shared
    torch.set_num_threads(1)
    with _said(init, rank).open("w") as said:
        os.dup2(said.fileno(), 2)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2)
    try:
        dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)
    while True:
        try:
            sent = pipe.recv_bytes()
        except EOFError:
            break
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            case, args = pickle.loads(sent)  # by their names: this imports the modules that they are in
            outcome = (True, case(*args))
            dist.barrier()
        except BaseException:
            outcome = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(outcome))
    os._exit(0)  # the group is left without ceremony: how to leave it well is another test
