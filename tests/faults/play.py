"""Cases on ranks of their own, of which one dies: what the others see.

Every case has processes of its own, because some of them do not live to the end.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

from tests.support.ranks import PATIENCE

TIMEOUT = 3.0  # seconds: the process group's
SLACK = 4.0 * PATIENCE  # seconds that a busy machine may take beyond it
START = timedelta(seconds=20 * PATIENCE)  # until all ranks are there


class Play:
    """A case of this module on `size` ranks, running from here on.

    To be used from one thread: multiprocessing may read a process's end in one and miss it in another.
    """

    def __init__(self, case: Callable, size: int, dying: int, *args: object) -> None:
        self._title, self._dying = f"{case.__name__}{args}", dying
        self._cast = case, size, dying, args
        self._begin()

    def _begin(self) -> None:
        case, size, dying, args = self._cast
        self._folder = tempfile.TemporaryDirectory(prefix="gradsync-faults-")
        self._end = time.monotonic() + 3 * TIMEOUT + SLACK + START.total_seconds()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed", "gradsync", "tests.faults.cases"])
        self._ranks = []
        for rank in range(size):
            here, there = context.Pipe()
            store = f"file://{self._folder.name}/store"
            process = context.Process(target=_serve, args=(rank, size, store, case, dying, args, there), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def seen(self) -> dict[int, dict]:
        """What each of those that survived saw, by rank."""
        for again in (False, True):
            if again:
                self._begin()  # gloo could not connect the ranks, which happens once in some hundred times
            seen = self._seen()
            if None not in seen.values():
                return seen
        raise AssertionError(f"the ranks of {self._title} could not be connected, twice")

    def _seen(self) -> dict[int, dict | None]:
        seen = {}
        try:
            for rank, (process, pipe) in enumerate(self._ranks):
                if rank != self._dying:
                    assert pipe.poll(self._left()), f"HANG: rank {rank} in {self._title}"
                    seen[rank] = pickle.loads(pipe.recv_bytes())
                    if seen[rank] is None:
                        break
                    process.join(self._left())
                    seen[rank]["exit code"] = process.exitcode
        finally:
            for process, _ in self._ranks:
                process.kill()
                process.join()
            self._folder.cleanup()
        return seen

    def _left(self) -> float:
        return max(0.1, self._end - time.monotonic())


def play(case: Callable, size: int, dying: int, *args: object) -> dict[int, dict]:
    """Run a case to its end; what each rank that survived saw."""
    return Play(case, size, dying, *args).seen()


def _serve(rank: int, size: int, init: str, case: Callable, dying: int, args: tuple, pipe) -> None:
    import torch
    import torch.distributed as dist

    from gradsync.engines import settle_all_groups

    torch.set_num_threads(1)
    torch.manual_seed(0)
    meeting = dist.FileStore(f"{init.removeprefix('file://')}-meeting", size)
    meeting.set(str(rank), "here")
    meeting.wait([str(one) for one in range(size)], START)  # on a busy machine longer than the group's own time-out
    timeout = timedelta(seconds=TIMEOUT)
    try:
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError:
        pipe.send_bytes(pickle.dumps(None))
        raise
    scene = Scene(rank, dying)
    torch.optim.SGD(scene.model.parameters())  # the first one imports for a second
    error = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            case(scene, *args)
        except Exception as raised:
            error = raised
    seconds = time.monotonic() - (scene.left or time.monotonic())
    pipe.send_bytes(
        pickle.dumps({
            "kind": type(error).__name__,
            "text": str(error),
            "warned": [str(one.message) for one in warned],
            "cause": type(error.__cause__).__name__ if error is not None else None,
            "seconds": seconds,
            "gradients": sum(p.grad is not None for p in scene.model.parameters()),
            "index": scene.step.progress.index,
        })
    )
    settle_all_groups()
    dist.destroy_process_group()


class Scene:
    """A model in training, and the moment at which one rank leaves it."""

    def __init__(self, rank: int, dying: int) -> None:
        import torch
        from torch import nn

        import gradsync

        self.rank, self.dying = rank, dying
        self.left = 0.0  # when this rank last went into something in which others may be missing
        self.ready = False
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.calls = 0
        self.body = lambda model, x: model(x).square().mean()

        @gradsync.accumulating(steps=4)
        def train_step(model, optimizer, x):
            return self.body(model, x)

        self.step = train_step
        self.home = self.model
        self.batch = torch.ones(4, 3)

    @property
    def optimizer(self):
        import torch

        if not hasattr(self, "_optimizer"):
            self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self._optimizer

    def call(self, times: int = 1) -> None:
        for _ in range(times):
            self.calls += 1
            self.left = time.monotonic()
            self.step(self.home, self.optimizer, self.batch)

    def die(self, signal_=signal.SIGKILL) -> None:
        """The end of one rank, here; the others go on."""
        if self.rank == self.dying:
            os.kill(os.getpid(), signal_)
        self.left = time.monotonic()
