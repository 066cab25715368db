"""The backward of a micro-batch inside a `Hold`; engines that are armed synchronise in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.autograd import graph

from gradsync._errors import GradSyncError
from gradsync.functional._team.order import Order

RunBackward: TypeAlias = Callable[[torch.Tensor], object]
"""Runs a backward in place of `loss.backward()`: `accelerator.backward`, `fabric.backward`."""


def backward(
    loss: torch.Tensor, order: Order, seed: torch.Tensor | None = None, run: RunBackward | None = None
) -> None:
    """Run the backward of `loss` inside a `Hold`; the first engines of `order` synchronise in it. Call its `end` then.

    `seed` is the gradient to begin with, 1 by default; `run` runs the backward, `loss.backward` by default.
    """
    for engine in order.armed:
        engine.arm(loss)
    if run is not None:
        _insist(run, loss if seed is None else loss * seed)
    elif seed is None or _RUN is None or type(loss) is not torch.Tensor:
        loss.backward(seed)
    else:
        _RUN((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


# What `loss.backward(seed)` calls, without its checks of the seed, which is ours; they cost a fifth of the call. It is
# private in torch; without it, and for a subclass of tensors, `backward` is called.
_RUN: Callable[..., Any] | None = getattr(graph, "_engine_run_backward", None)


def _insist(run: RunBackward, loss: torch.Tensor) -> None:
    """Let `run` run the backward; raise if it did not."""
    who = getattr(run, "__self__", None)
    steps = getattr(who, "gradient_accumulation_steps", 1)
    if steps != 1:
        raise GradSyncError(
            f"What is given as run= must run the backward of the loss as it is, but this {type(who).__name__} divides "
            f"it by its gradient_accumulation_steps, which are {steps}, and gradsync divides already. Make it with "
            "gradient_accumulation_steps=1."
        )
    came: list[None] = []
    watch = loss.register_hook(lambda _: came.append(None))
    try:
        run(loss)
    finally:
        watch.remove()
    if not came:
        raise GradSyncError(
            f"What is given as run= must run the backward of the loss that it is called with, but {run!r} returned and "
            "no backward had come to that loss. Pass accelerator.backward or fabric.backward, or leave run= out."
        )
