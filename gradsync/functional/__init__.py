"""What the decorator is made of, for people who keep their own loop: functions that take models and optimizers.

Nothing in here holds an optimizer or remembers a model. From the smallest: arithmetic on whole numbers (`window_size`,
`sizes`, `correction`), functions on gradients (`normalise`, `clip`, `norm`, `all_finite`, `discard`), engines held
and synchronised (`no_sync`, `sync_gradients`, `OpenWindow`), the boundary (`update`), and a whole loop (`sync_every`).
"""

from gradsync.functional._agreement import insist, meet
from gradsync.functional._gradients import all_finite, clip, discard, norm, normalise
from gradsync.functional._loss import LossSum, detach, find_loss
from gradsync.functional._no_sync import no_sync
from gradsync.functional._open_window import OpenWindow
from gradsync.functional._stream import lookahead
from gradsync.functional._sync_every import MicroStep, sync_every
from gradsync.functional._sync_gradients import sync_gradients
from gradsync.functional._update import Update, update
from gradsync.functional._window import Steps, correction, sizes, window_size

__all__ = [
    "LossSum",
    "MicroStep",
    "OpenWindow",
    "Steps",
    "Update",
    "all_finite",
    "clip",
    "correction",
    "detach",
    "discard",
    "find_loss",
    "insist",
    "lookahead",
    "meet",
    "no_sync",
    "norm",
    "normalise",
    "sizes",
    "sync_every",
    "sync_gradients",
    "update",
    "window_size",
]
