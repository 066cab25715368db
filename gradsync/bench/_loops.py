"""Loops that users write without gradsync: by hand, and with other libraries."""

import importlib
import itertools
import os
from contextlib import nullcontext

from gradsync.bench._task import Task, Window, on_ddp, update


def baseline(task: Task) -> Window:
    """Synchronise in every backward."""
    model, optimizer, batches = on_ddp(task), task.workload.optimizer, iter(task.loader)

    def window() -> None:
        for batch in itertools.islice(batches, task.steps):
            (task.workload.compute_loss(model, batch) / task.steps).backward()
        update(optimizer)

    return Window(window)


def improperly(task: Task) -> Window:
    """Put `no_sync` around the backward alone: DDP has armed itself in the forward, so it still synchronises."""
    model, optimizer, batches = on_ddp(task), task.workload.optimizer, iter(task.loader)

    def window() -> None:
        for index, batch in enumerate(itertools.islice(batches, task.steps), start=1):
            loss = task.workload.compute_loss(model, batch) / task.steps
            with model.no_sync() if index < task.steps else nullcontext():
                loss.backward()
        update(optimizer)

    return Window(window)


def no_sync(task: Task) -> Window:
    """Put `no_sync` around forward and backward; all other ways are compared with this one."""
    model, optimizer, batches = on_ddp(task), task.workload.optimizer, iter(task.loader)

    def window() -> None:
        for index, batch in enumerate(itertools.islice(batches, task.steps), start=1):
            with model.no_sync() if index < task.steps else nullcontext():
                (task.workload.compute_loss(model, batch) / task.steps).backward()
        update(optimizer)

    return Window(window)


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
                update(optimizer)

    return Window(window)


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
        update(optimizer)

    return Window(window)


def compute(task: Task) -> Window:
    """Use no engine: the time of the same window when nothing is sent."""
    workload, batches = task.workload, iter(task.loader)

    def window() -> None:
        for batch in itertools.islice(batches, task.steps):
            (workload.compute_loss(workload.model, batch) / task.steps).backward()
        update(workload.optimizer)

    return Window(window)
