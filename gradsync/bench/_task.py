"""What a way to accumulate is given, and what it gives: the frame of every loop that the bench measures."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from gradsync.bench._models import Workload


class Loader:
    """A few ready micro-batches, over and over, with a known length that no run reaches: a long epoch's loader."""

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
    """How many micro-batches of a window run while the gradients of the one before travel, in a way that overlaps."""


class Window(NamedTuple):
    """What a way makes of a task."""

    run: Callable[[], object]
    """Train for one window."""
    settle: Callable[[], None] | None = None
    """Wait for what still travels after a window has run; None where nothing does."""


def on_ddp(task: Task) -> DistributedDataParallel:
    """Put the task's model on DDP, as a user does."""
    return DistributedDataParallel(
        task.workload.model, device_ids=None if task.device.type == "cpu" else [task.device.index]
    )


def update(optimizer: Any) -> None:
    """Do what a window ends with."""
    optimizer.step()
    optimizer.zero_grad()
