"""Under torchrun, before there is a process group: every door but `process_group` is an error."""

from __future__ import annotations

import pytest
import torch

import gradsync
from gradsync import GradSyncError
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch
from tests.support.verdicts import says

X = micro_batch(0, 0)


def made():
    model = small_model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_step():
    return gradsync.accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))


def call():
    step, pair = train_step(), made()
    step(*pair, X)
    step.flush()


def over():
    step, pair = train_step(), made()
    for x in step.over([X]):
        step(*pair, x)


def inside_audit():
    with gradsync.audit(*made()):
        pass


def inside_no_sync():
    with gradsync.no_sync(made()[0]):
        pass


DOORS = {
    "accumulating": call,
    "over": over,
    "sync_every": lambda: next(iter(gradsync.sync_every(made()[0], 2, [X]))),
    "sync_every, endless": lambda: next(iter(gradsync.sync_every(made()[0], 2))),
    "ddp": lambda: gradsync.ddp(made()[0]),
    "no_sync": inside_no_sync,
    "sync_gradients": lambda: gradsync.sync_gradients(made()[0]),
    "audit": inside_audit,
}


@pytest.mark.parametrize("door", DOORS)
def test_several_processes_and_no_group(monkeypatch, door):
    """Each rank would train a model of its own, and end with exit code 0."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(GradSyncError) as error:
        DOORS[door]()
    says(str(error.value), "WORLD_SIZE", "2", "process group", "process_group()|init_process_group")


@pytest.mark.parametrize("value", ["1", None, ""])
@pytest.mark.parametrize("door", DOORS)
def test_one_process(monkeypatch, door, value):
    """A plain python, or torchrun with one process: nothing to ask for."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("WORLD_SIZE", value)
    DOORS[door]()


@pytest.mark.parametrize("name", ["rank", "world_size", "local_rank", "device"])
def test_process_group_without_with(name):
    """`world = gradsync.process_group()` has no rank; the error says how to write it."""
    world = gradsync.process_group()
    with pytest.raises((GradSyncError, AttributeError, TypeError)) as error:
        getattr(world, name)
    says(str(error.value), "with gradsync.process_group()", name)


@pytest.mark.parametrize("name", ["backwards", "syncs", "updates", "bytes", "wasted", "missed"])
def test_audit_without_with(name):
    report = gradsync.audit(*made())
    with pytest.raises((GradSyncError, AttributeError, TypeError)) as error:
        getattr(report, name)
    says(str(error.value), "with gradsync.audit(", name)
