"""What runs on the ranks for test_faults.py: each case is told which rank dies, and tells what the others saw.

Every case has processes of its own, because some of them do not live to the end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import warnings
from datetime import timedelta

TIMEOUT = 3.0  # seconds: the process group's
SLACK = 4.0  # seconds that a busy machine may take beyond it


class Play:
    """A case of this module on `size` ranks, running from here on.

    To be used from one thread: multiprocessing may read a process's end in one and miss it in another.
    """

    def __init__(self, case: str, size: int, dying: int, *args: object) -> None:
        self._title, self._dying = f"{case}{args}", dying
        self._folder = tempfile.TemporaryDirectory(prefix="gradsync-faults-")
        self._end = time.monotonic() + 3 * TIMEOUT + 20
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
        seen = {}
        try:
            for rank, (process, pipe) in enumerate(self._ranks):
                if rank != self._dying:
                    assert pipe.poll(self._left()), f"HANG: rank {rank} in {self._title}"
                    seen[rank] = pickle.loads(pipe.recv_bytes())
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


def play(case: str, size: int, dying: int, *args: object) -> dict[int, dict]:
    """Run a case to its end; what each rank that survived saw."""
    return Play(case, size, dying, *args).seen()


def _serve(rank: int, size: int, init: str, case: str, dying: int, args: tuple, pipe) -> None:
    import torch
    import torch.distributed as dist

    from gradsync.engines import settle_all_groups

    torch.set_num_threads(1)
    torch.manual_seed(0)
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=timeout)
    scene = Scene(rank, dying)
    torch.optim.SGD(scene.model.parameters())  # the first one imports for a second
    error = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            globals()[case](scene, *args)
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


def _wrap(scene: Scene, how: str) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    if how == "buffers":
        scene.model = scene.home = torch.nn.Sequential(torch.nn.BatchNorm1d(3), scene.model)
    elif how == "ddp":
        scene.home = DistributedDataParallel(scene.model)
    elif how == "unused":
        scene.home = DistributedDataParallel(scene.model, find_unused_parameters=True, bucket_cap_mb=1e-4)
    elif how == "static":
        scene.home = DistributedDataParallel(scene.model, static_graph=True)


def in_a_window(scene: Scene, how: str, moment: str) -> None:
    """In window 1: between two micro-batches, at the boundary, or in its backward; or standing still."""
    import torch

    _wrap(scene, how)
    scene.call(4)

    class Deadly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if moment == "backward" and scene.calls == 8:
                scene.die()
            return gradient

    scene.body = lambda model, x: Deadly.apply(model(Deadly.apply(x.clone().requires_grad_()))).square().mean()
    scene.call(2)
    if moment == "between":
        scene.die()
    if moment == "stands still":
        scene.die(signal.SIGSTOP)
    scene.call(1)
    if moment == "boundary":
        scene.die()
    scene.call(1)


def as_a_window_opens(scene: Scene) -> None:
    _wrap(scene, "buffers")
    scene.call(4)
    scene.die()
    scene.call(4)


def at_the_first_call(scene: Scene) -> None:
    scene.die()
    scene.call()


def at_the_first_boundary(scene: Scene) -> None:
    scene.call(3)
    scene.die()
    scene.call()


def at_the_start_of_over(scene: Scene) -> None:
    scene.call(4)
    scene.die()
    for _ in scene.step.over(range(3)):
        scene.call()


def at_flush(scene: Scene) -> None:
    scene.call(6)
    scene.die()
    scene.step.flush()


def after_the_others_have_run_out(scene: Scene) -> None:
    """The survivors have no data left and pair with a rank that dies."""
    for _ in scene.step.over(range(12 if scene.rank == scene.dying else 5)):
        if scene.calls == 7:
            if scene.rank == scene.dying:
                time.sleep(1)  # to hear that the others have run out
            scene.die()
        scene.call()
        scene.left = time.monotonic()


def before_it_hears_that_the_others_have_run_out(scene: Scene) -> None:
    for _ in scene.step.over(iter(range(12 if scene.rank == scene.dying else 5))):
        if scene.calls == 4 and scene.rank == scene.dying:
            scene.die(signal.SIGSTOP)
        if scene.calls == 4:
            time.sleep(1)  # so that it stands still by then
        scene.call()


def in_sync_every(scene: Scene, plain: bool = False) -> None:
    import gradsync

    for micro, x in gradsync.sync_every(scene.model, 2, [scene.batch] * 8):
        if (micro.window, micro.index) == (2, 1):
            scene.die()
        loss = scene.model(x).square().mean()
        loss.backward() if plain else micro.backward(loss)
        if micro.last:
            scene.optimizer.step()
            scene.optimizer.zero_grad()


def in_sync_gradients(scene: Scene) -> None:
    import gradsync

    scene.call(4)
    with gradsync.no_sync(scene.model):
        scene.model(scene.batch).sum().backward()
    scene.die()
    try:
        gradsync.sync_gradients(scene.model)
    finally:
        scene.model.zero_grad()


def while_another_fails(scene: Scene, how: str) -> None:
    """The survivor's own backward fails at the boundary, and nobody is there to complete its collectives with."""
    import torch

    class Trap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if scene.calls == 8:
                scene.die()
                time.sleep(0.3)  # dead for certain
                raise ZeroDivisionError("the user's own")
            return gradient

    _wrap(scene, how)
    scene.body = lambda model, x: model(Trap.apply(x.clone().requires_grad_())).square().mean()
    scene.call(8)


def in_the_body(scene: Scene) -> None:
    """A collective of the user's own, in the body: that error is his."""
    import torch
    import torch.distributed as dist

    scene.call(4)
    scene.die()
    scene.body = lambda model, x: (dist.all_reduce(torch.ones(1)), model(x).mean())[1]
    with contextlib.suppress(ZeroDivisionError):
        scene.call()
