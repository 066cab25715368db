"""Loops that users write with gradsync."""

import itertools
from typing import Any

import torch
from torch import Tensor

import gradsync
from gradsync.bench._remedies import REMEDIES
from gradsync.bench._task import Task, Window, on_ddp, update


def accumulating(task: Task) -> Window:
    """Decorate, and pass the bare model: the decorator puts DDP behind it."""
    return _decorated(task, task.workload.model, {})


def accumulating_ddp(task: Task) -> Window:
    """Decorate, and pass a model that is on DDP already."""
    return _decorated(task, on_ddp(task), {})


def overlap(task: Task) -> Window:
    """Decorate, and let gradients travel while the next window computes."""
    return _decorated(task, task.workload.model, REMEDIES["overlap"].keywords(task.overlap))


def bf16(task: Task) -> Window:
    """Decorate, and let gradients travel in half as many bytes."""
    return _decorated(task, task.workload.model, REMEDIES["bf16"].keywords(task.overlap))


def both(task: Task) -> Window:
    """Decorate, with half as many bytes that travel while the next window computes."""
    return _decorated(task, task.workload.model, REMEDIES["both"].keywords(task.overlap))


def sync_every(task: Task) -> Window:
    """Iterate, on DDP."""
    model, optimizer = on_ddp(task), task.workload.optimizer
    micro_steps = iter(gradsync.sync_every(model, task.steps, task.loader))

    def window() -> None:
        for step, batch in itertools.islice(micro_steps, task.steps):
            step.backward(task.workload.compute_loss(model, batch))
            if step.last:
                update(optimizer)

    return Window(window)


def _decorated(task: Task, model: Any, keywords: dict[str, Any]) -> Window:
    def train_step(model: Any, _optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        return task.workload.compute_loss(model, batch)

    # Any: a gradsync without these keywords has no `settle` either.
    decorated: Any = gradsync.accumulating(steps=task.steps, **keywords)(train_step)
    optimizer = task.workload.optimizer
    batches = iter(decorated.over(task.loader))

    def window() -> None:
        for batch in itertools.islice(batches, task.steps):
            decorated(model, optimizer, batch)

    return Window(window, decorated.settle if "overlap" in keywords else None)
