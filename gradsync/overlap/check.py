"""Raises where gradients cannot travel while the next window computes.

Private in torch (read in torch 2.13; tests/overlap/test_check.py fails when it changes): `ddp._use_python_reducer`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsync._errors import GradSyncError
from gradsync.functional import bare_optimizer, is_scaling
from gradsync.overlap.provisional import communicates
from gradsync.overlap.travel_hook import foreign_hook

# By name, because importing torch.distributed.optim takes long. Other steps that communicate are found when they run.
_COMMUNICATES = {
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer",
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer",
    "torch.distributed.optim.optimizer.DistributedOptimizer",
}


def check_settings(overlap: object, steps: object, *, sync: str) -> int:
    """Return `overlap`; raise a TypeError or ValueError if the decorator does not take it."""
    if not isinstance(overlap, int) or isinstance(overlap, bool):
        raise TypeError(
            f"overlap needs the number of micro-batches that run while gradients travel, but came as {overlap!r}, a "
            f"{type(overlap).__name__}. Pass an int from 0, which is exact, to steps."
        )
    if overlap < 0 or (isinstance(steps, int) and overlap > steps):
        raise ValueError(
            f"overlap needs a number of micro-batches from 0, which is exact, to steps, which is {steps}, but is "
            f"{overlap}."
        )
    if overlap and sync != "window":
        raise ValueError(
            f"overlap needs gradients that travel once a window, but sync is {sync!r}. Use sync='window', or overlap=0."
        )
    return overlap


def check_scaler(scaler: GradScaler | None) -> None:
    """Raise if there is a scaler and it is enabled."""
    if is_scaling(scaler):
        raise GradSyncError(
            "overlap needs gradients as they are, for a provisional update before the true one, but a GradScaler "
            "scales them and learns from each update. Train in bfloat16, which needs none, or use overlap=0."
        )


def check_ddp(ddp: object) -> None:
    """Raise unless the gradients of `ddp`, an engine's module or the engine itself, can travel."""
    if not isinstance(ddp, DistributedDataParallel):
        raise GradSyncError(
            "overlap needs a bare model, or a DistributedDataParallel, whose gradients it can send a copy of, but "
            f"this model is on {type(ddp).__name__}. Hand gradsync the bare model, or use overlap=0."
        )
    which = ""
    if ddp.static_graph:
        which = "was made with static_graph=True, which reduces at the end of its first backward"
    elif ddp.find_unused_parameters:
        which = "was made with find_unused_parameters=True, which waits for the other ranks in each boundary's backward"
    elif foreign := foreign_hook(ddp):
        which = f"has the communication hook {foreign}, and torch takes one"
    elif ddp._use_python_reducer:
        which = "is compiled with optimize_ddp='python_reducer', which has no buckets to send"
    if which:
        raise GradSyncError(
            "overlap needs a DistributedDataParallel whose backward only hands its buckets on, but this one "
            f"{which}. Hand gradsync the bare model, which needs none of it, or use overlap=0."
        )


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Raise if the step of one is known to communicate."""
    for optimizer in map(bare_optimizer, optimizers):
        if any(f"{kind.__module__}.{kind.__qualname__}" in _COMMUNICATES for kind in type(optimizer).__mro__):
            raise GradSyncError(communicates([optimizer]))


def check_compress(compress: object) -> torch.dtype | None:
    """The dtype in which gradients travel, None for their own; raise a ValueError unless it is None or "bf16"."""
    if compress is None:
        return None
    if compress != "bf16":
        raise ValueError(
            f'compress needs "bf16", or None for gradients as they are, but it is {compress!r}. (In float16, gradients '
            "of summed losses overflow, and those of small means vanish.)"
        )
    return torch.bfloat16
