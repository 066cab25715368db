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


def wrapped(how: str, came: str, runs: str):
    """What comes to gradsync, and what the body runs."""
    rank, model = dist.get_rank(), small_model(unused=False)
    homes = {"ddp": DDP(model), "module": model, "layer": model[0] if hasattr(model, "__getitem__") else model}
    homes["teacher"] = DDP(small_model(unused=False))
    optimizer = FullRecorder(model.parameters(), lr=0.1)

    def body(x: torch.Tensor) -> torch.Tensor:
        if runs == "teacher":
            with torch.no_grad():
                homes["teacher"](x)
        return mean_loss(homes["module" if runs == "teacher" else runs], x)

    def run() -> None:
        data = [micro_batch(rank, i) for i in range(LENGTHS[rank])]
        if how == "accumulating":
            step = gradsync.accumulating(steps=2, model=homes[came], optimizer=optimizer)(body)
            for x in step.over(data):
                step(x)
        else:
            for step, x in gradsync.sync_every(homes[came], 2, data):
                step.backward(body(x))
                if step.last:
                    optimizer.step()
                    optimizer.zero_grad()
        compare(optimizer.seen, train(small_model(unused=False), cut(LENGTHS, 2), window_mean, lr=0.1)[0])

    return verdict(run)


@pytest.mark.parametrize("how", ["accumulating", "sync_every"])
def test_the_module_comes_and_the_wrapper_runs(ranks, how):
    refused(verdicts(ranks(2), wrapped, how, "module", "ddp"), "must come to", "as that DistributedDataParallel", "Pass the")


@pytest.mark.parametrize("how", ["accumulating", "sync_every"])
@pytest.mark.parametrize(("came", "runs"), [("ddp", "ddp"), ("ddp", "module"), ("module", "module"), ("module", "teacher")])
def test_every_right_way(ranks, how, came, runs):
    exact(verdicts(ranks(2), wrapped, how, came, runs))


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
