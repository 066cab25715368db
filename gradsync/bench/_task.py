"""What a way to accumulate gets, and what it returns."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from gradsync.bench._models import Workload


class Loader:
    """Repeats a few ready micro-batches. Its length is known and longer than any run, as in a long epoch."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self.batches)


class Task(NamedTuple):
    """What a way gets: a workload of its own, the micro-batches, and how many make a window."""

    workload: Workload
    loader: Loader
    steps: int
    device: torch.device
    overlap: int = 0
    """For a way that overlaps: how many micro-batches of a window run while the last window's gradients travel."""


class Window(NamedTuple):
    """A window's training, as a way does it."""

    run: Callable[[], object]
    """Train for one window."""
    settle: Callable[[], None] | None = None
    """Wait for what still travels after a window has run; None if nothing does."""


def on_ddp(task: Task) -> DistributedDataParallel:
    """Put the task's model on DDP, as a user does."""
    return DistributedDataParallel(
        task.workload.model, device_ids=None if task.device.type == "cpu" else [task.device.index]
    )


def update(optimizer: Any) -> None:
    """Make the update at the end of a window."""
    optimizer.step()
    optimizer.zero_grad()
