"""Gradient accumulation and gradient synchronisation in PyTorch, exact, and without a framework."""

from gradsync import engines, functional
from gradsync._audit import audit
from gradsync._errors import GradSyncError
from gradsync.decorator import Progress, accumulating
from gradsync.functional import LossSum, MicroStep, no_sync, sync_every, sync_gradients
from gradsync.launch import ddp, process_group

__all__ = [
    "GradSyncError",
    "LossSum",
    "MicroStep",
    "Progress",
    "accumulating",
    "audit",
    "ddp",
    "engines",
    "functional",
    "no_sync",
    "process_group",
    "sync_every",
    "sync_gradients",
]
