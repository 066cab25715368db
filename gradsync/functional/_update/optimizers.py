"""Optimizers, torch's and others': what they step; how one of them is stepped, and cleared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradsync._errors import GradSyncError
from gradsync.functional._update.gradients import discard


def owned(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """The parameters of the optimizers, each once."""
    found = [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]
    return found if len(found) == 1 else list({id(parameter): parameter for parameter in found}.values())


def bare_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside that of Accelerate or Fabric; any other optimizer itself."""
    inner = optimizer.__dict__.get("optimizer", optimizer.__dict__.get("_optimizer"))
    return bare_optimizer(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def step_one(optimizer: Any) -> None:
    """Step it. Raise if it is a wrapper that has not stepped the optimizer inside."""
    inner = bare_optimizer(optimizer)
    if inner is optimizer or getattr(optimizer, "scaler", None) is not None:  # which may skip a step by itself
        optimizer.step()
        return
    stepped: list[None] = []
    handle = inner.register_step_post_hook(lambda *_: stepped.append(None))
    try:
        optimizer.step()
    finally:
        handle.remove()
    if not stepped:
        raise GradSyncError(
            f"At a boundary the optimizer must step, but {type(optimizer).__name__}.step() did not step the "
            f"{type(inner).__name__} inside. Leave `with accelerator.accumulate(...)` out around the call, and "
            "make the Accelerator with gradient_accumulation_steps=1: gradsync accumulates."
        )


def zero(optimizers: Iterable[Optimizer]) -> None:
    """Set the gradients to None."""
    for optimizer in map(bare_optimizer, optimizers):
        # torch's own does what `discard` does, with entries for a profiler, which cost more
        if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(optimizer):
            optimizer.zero_grad()
        discard(owned([optimizer]))
