"""What runs on the ranks for test_lost_ranks.py: each case is told which rank dies."""

from __future__ import annotations

import contextlib
import signal
import time

from tests.faults.play import Scene


# -- where the model is ---------------------------------------------------------------------------------------------


def bare(scene: Scene) -> None:
    pass


def with_buffers(scene: Scene) -> None:
    import torch

    scene.model = scene.home = torch.nn.Sequential(torch.nn.BatchNorm1d(3), scene.model)


def ddp(scene: Scene, **options) -> None:
    from torch.nn.parallel import DistributedDataParallel

    scene.home = DistributedDataParallel(scene.model, **options)


def find_unused(scene: Scene) -> None:
    ddp(scene, find_unused_parameters=True, bucket_cap_mb=1e-4)


def static(scene: Scene) -> None:
    ddp(scene, static_graph=True)


def fsdp2(scene: Scene) -> None:
    from torch.distributed.fsdp import fully_shard

    scene.home = fully_shard(scene.model)


# -- when a rank dies -----------------------------------------------------------------------------------------------


def between(scene: Scene) -> None:
    scene.call(2)
    scene.die()
    scene.call(2)


def standing_still(scene: Scene) -> None:
    scene.call(2)
    scene.die(signal.SIGSTOP)
    scene.call(2)


def at_the_boundary(scene: Scene) -> None:
    scene.call(3)
    scene.die()
    scene.call()


def in_the_backward(scene: Scene) -> None:
    in_the_backward_of(scene, call=8)


def in_the_backward_of(scene: Scene, call: int) -> None:
    import torch

    class Deadly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if scene.calls == call:
                scene.die()
            return gradient

    scene.body = lambda model, x: Deadly.apply(model(Deadly.apply(x.clone().requires_grad_()))).square().mean()
    scene.call(8 - scene.calls)


def in_window_1(scene: Scene, wrap, moment) -> None:
    wrap(scene)
    scene.call(4)
    moment(scene)


def as_a_window_opens(scene: Scene) -> None:
    with_buffers(scene)
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


def in_sync_every(scene: Scene, plain: bool = False, wrap=bare) -> None:
    import gradsync

    wrap(scene)
    for micro, x in gradsync.sync_every(scene.home, 2, [scene.batch] * 8):
        if (micro.window, micro.index) == (2, 1):
            scene.die()
        loss = scene.home(x).square().mean()
        loss.backward() if plain else micro.backward(loss)
        if micro.last:
            scene.optimizer.step()
            scene.optimizer.zero_grad()


def in_a_held_micro_batch_that_synchronises(scene: Scene, wrap) -> None:
    import gradsync

    wrap(scene)
    scene.step = gradsync.accumulating(steps=4, sync="each")(scene.step.__wrapped__)
    in_the_backward_of(scene, call=6)


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


def while_another_fails(scene: Scene, wrap) -> None:
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

    wrap(scene)
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
