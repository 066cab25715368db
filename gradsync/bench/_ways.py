"""The columns: each way to accumulate, written as its users write it. A way makes its engine and returns one window."""

import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsync.bench._models import Workload

Window = Callable[[], None]


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


def baseline(task: Task) -> Window:
    """Synchronise in every backward."""
    model, optimizer, batches = _ddp(task), task.workload.optimizer, iter(task.loader)

    def window() -> None:
        for batch in itertools.islice(batches, task.steps):
            (task.workload.compute_loss(model, batch) / task.steps).backward()
        _update(optimizer)

    return window


def improperly(task: Task) -> Window:
    """Put `no_sync` around the backward alone: DDP has armed itself in the forward, so it still synchronises."""
    model, optimizer, batches = _ddp(task), task.workload.optimizer, iter(task.loader)

    def window() -> None:
        for index, batch in enumerate(itertools.islice(batches, task.steps), start=1):
            loss = task.workload.compute_loss(model, batch) / task.steps
            with model.no_sync() if index < task.steps else nullcontext():
                loss.backward()
        _update(optimizer)

    return window


def no_sync(task: Task) -> Window:
    """Put `no_sync` around forward and backward: what every other column is compared with."""
    model, optimizer, batches = _ddp(task), task.workload.optimizer, iter(task.loader)

    def window() -> None:
        for index, batch in enumerate(itertools.islice(batches, task.steps), start=1):
            with model.no_sync() if index < task.steps else nullcontext():
                (task.workload.compute_loss(model, batch) / task.steps).backward()
        _update(optimizer)

    return window


def accumulating(task: Task) -> Window:
    """Decorate, and pass the bare model: the decorator puts DDP behind it."""
    return _decorated(task, task.workload.model)


def accumulating_ddp(task: Task) -> Window:
    """Decorate, and pass a model that is on DDP already."""
    return _decorated(task, _ddp(task))


def sync_every(task: Task) -> Window:
    """Iterate, on DDP."""
    from gradsync import sync_every

    model, optimizer = _ddp(task), task.workload.optimizer
    micro_steps = iter(sync_every(model, task.steps, task.loader))

    def window() -> None:
        for step, batch in itertools.islice(micro_steps, task.steps):
            step.backward(task.workload.compute_loss(model, batch))
            if step.last:
                _update(optimizer)

    return window


def accelerate(task: Task) -> Window:
    """Use Hugging Face Accelerate's `accumulate`."""
    accelerator = importlib.import_module("accelerate").Accelerator(
        cpu=task.device.type == "cpu", gradient_accumulation_steps=task.steps
    )
    model, optimizer = accelerator.prepare(task.workload.model, task.workload.optimizer)
    batches = iter(task.loader)

    def window() -> None:
        for batch in itertools.islice(batches, task.steps):
            with accelerator.accumulate(model):
                accelerator.backward(task.workload.compute_loss(model, batch))
                _update(optimizer)

    return window


def fabric(task: Task) -> Window:
    """Use Lightning Fabric's `no_backward_sync`."""
    lightning = importlib.import_module("lightning_fabric")
    environment = importlib.import_module("lightning_fabric.plugins.environments").TorchElasticEnvironment()
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    maker = lightning.Fabric(
        accelerator=task.device.type,
        devices=devices,
        num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
        strategy=lightning.strategies.DDPStrategy(cluster_environment=environment),
    )
    maker.launch()
    model, optimizer = maker.setup(task.workload.model, task.workload.optimizer)
    batches = iter(task.loader)

    def window() -> None:
        for index, batch in enumerate(itertools.islice(batches, task.steps), start=1):
            with maker.no_backward_sync(model, enabled=index < task.steps):
                maker.backward(task.workload.compute_loss(model, batch) / task.steps)
        _update(optimizer)

    return window


def compute(task: Task) -> Window:
    """Use no engine: what the same window costs when nothing is ever sent."""
    workload, batches = task.workload, iter(task.loader)

    def window() -> None:
        for batch in itertools.islice(batches, task.steps):
            (workload.compute_loss(workload.model, batch) / task.steps).backward()
        _update(workload.optimizer)

    return window


class Way(NamedTuple):
    """A column."""

    title: str
    build: Callable[[Task], Window]
    package: str | None = None
    """What must be installed for it."""


WAYS: Mapping[str, Way] = {
    "baseline": Way("baseline", baseline),
    "improperly": Way("no_sync improperly", improperly),
    "no_sync": Way("no_sync", no_sync),
    "accumulating": Way("accumulating", accumulating),
    "accumulating_ddp": Way("accumulating on DDP", accumulating_ddp),
    "sync_every": Way("sync_every", sync_every),
    "accelerate": Way("Accelerate", accelerate, "accelerate"),
    "fabric": Way("Fabric", fabric, "lightning_fabric"),
    "compute": Way("compute alone", compute),
}

ALWAYS = ("no_sync", "compute")
"""What ratios, the limit and the advice are measured against."""


def installed(name: str) -> bool:
    """Whether this machine has what the way needs."""
    package = WAYS[name].package
    return package is None or importlib.util.find_spec(package) is not None


def _decorated(task: Task, model: Any) -> Window:
    from gradsync import accumulating

    @accumulating(steps=task.steps)
    def train_step(model: Any, _optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        return task.workload.compute_loss(model, batch)

    optimizer = task.workload.optimizer
    batches = iter(train_step.over(task.loader))

    def window() -> None:
        for batch in itertools.islice(batches, task.steps):
            train_step(model, optimizer, batch)

    return window


def _ddp(task: Task) -> DistributedDataParallel:
    return DistributedDataParallel(
        task.workload.model, device_ids=None if task.device.type == "cpu" else [task.device.index]
    )


def _update(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()
