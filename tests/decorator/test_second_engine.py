"""A wrapper that only the body knows, for a model that came bare: both engines would synchronise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from tests.support.models import small_model
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.verdicts import FullRecorder, compare, exact, refused, verdict, verdicts

LENGTHS = [5, 3]


def by_function(home, optimizer, body, data: list) -> None:
    step = gradsync.accumulating(steps=2, model=home, optimizer=optimizer)(body)
    for x in step.over(data):
        step(x)


def by_iterator(home, optimizer, body, data: list) -> None:
    for step, x in gradsync.sync_every(home, 2, data):
        step.backward(body(x))
        if step.last:
            optimizer.step()
            optimizer.zero_grad()


def wrapped(train_by, came: str, runs: str, teacher: bool):
    """What comes to gradsync, and what the body runs, perhaps beside a teacher on a wrapper of its own."""
    rank, model = dist.get_rank(), small_model(unused=False)
    homes = {"ddp": DDP(model), "module": model}
    teachers = [DDP(small_model(unused=False))] * teacher
    optimizer = FullRecorder(model.parameters(), lr=0.1)

    def body(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for one in teachers:
                one(x)
        return mean_loss(homes[runs], x)

    def run() -> None:
        train_by(homes[came], optimizer, body, [micro_batch(rank, i) for i in range(LENGTHS[rank])])
        compare(optimizer.seen, train(small_model(unused=False), cut(LENGTHS, 2), window_mean, lr=0.1)[0])

    return verdict(run)


@pytest.mark.parametrize("train_by", [by_function, by_iterator])
def test_the_module_comes_and_the_wrapper_runs(ranks, train_by):
    said = verdicts(ranks(2), wrapped, train_by, "module", "ddp", False)
    refused(said, "must come to", "as that DistributedDataParallel", "Pass the")


@pytest.mark.parametrize("train_by", [by_function, by_iterator])
@pytest.mark.parametrize(
    ("came", "runs", "teacher"),
    [("ddp", "ddp", False), ("ddp", "module", False), ("module", "module", False), ("module", "module", True)],
)
def test_every_right_way(ranks, train_by, came, runs, teacher):
    exact(verdicts(ranks(2), wrapped, train_by, came, runs, teacher))


def compiled():
    """The wrapper is inside what came."""
    rank, model = dist.get_rank(), small_model(unused=False)
    home = torch.compile(DDP(model), backend="eager")
    optimizer = FullRecorder(model.parameters(), lr=0.1)
    step = gradsync.accumulating(steps=2)(lambda home, optimizer, x: mean_loss(home, x))

    def run() -> None:
        for i in range(4):
            step(home, optimizer, micro_batch(rank, i))
        compare(optimizer.seen, train(small_model(unused=False), cut([4, 4], 2), window_mean, lr=0.1)[0])

    return verdict(run)


def sharded_parts():
    """A unit below the root is one of the model's own."""
    rank, model = dist.get_rank(), small_model(unused=False)
    for name, child in list(model.named_children()):
        if any(True for _ in child.parameters()):
            setattr(model, name, FSDP(child, device_id=torch.device("cpu")))
    home = FSDP(model, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(home.parameters(), lr=0.1)
    step = gradsync.accumulating(steps=2)(lambda home, optimizer, x: mean_loss(home, x))

    def run() -> None:
        for i in range(2):
            step(home, optimizer, micro_batch(rank, i))

    return verdict(run)


@pytest.mark.parametrize("case", [compiled, sharded_parts])
def test_wrappers_inside_what_came(ranks, case):
    exact(verdicts(ranks(2), case))
