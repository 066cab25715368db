"""Backwards that a reducer cannot take: an error of ours on every rank, after which training goes on as if nothing was."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync import GradSyncError, accumulating
from tests.changes.rule import Net, sum_of_models
from tests.support.reference import micro_batch, states

WRAPS = {"bare": None, "ddp": {}, "find_unused": {"find_unused_parameters": True}, "static": {"static_graph": True},
         "views": {"gradient_as_bucket_view": True}}  # fmt: skip


def inside(home):
    return home.module if isinstance(home, DDP) else home


def checkpointed_twice(home, x):
    """One layer in two reentrant checkpoints: its gradient comes twice."""
    y = home(x)
    for _ in range(2):
        y = checkpoint(inside(home).head, checkpoint(inside(home).body, inside(home).inp(x), use_reentrant=True),
                       use_reentrant=True) + y  # fmt: skip
    return y.sum()


def sparse_by_function(home, x):
    """Nothing of the module says that these gradients are sparse."""
    ids = (x[:, 0].abs() * 10).long() % 4
    net = inside(home)
    return net.head(net.body(net.inp(x) + embedding(ids, net.emb.weight, sparse=True))).sum()


def refused(odd, wrap: str, how: str, steps: int) -> str:
    """A window with a loss of such a kind between others."""
    model, rank, size = Net(), dist.get_rank(), dist.get_world_size()
    windows = [[(r, i) for r in range(size) for i in range(w * steps, (w + 1) * steps)] for w in range(3)]

    def window_mean(model, window):
        return sum(sum_of_models(model, micro_batch(*place)) for place in window) / len(window)

    expected = states(model, windows, window_mean)
    home = model if WRAPS[wrap] is None else DDP(model, **WRAPS[wrap])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = accumulating(steps=steps)(lambda home, optimizer, loss_of, x: loss_of(home, x))

    def window(number: int, loss_of) -> None:
        items = [micro_batch(rank, i) for i in range(number * steps, (number + 1) * steps)]
        if how == "accumulating":
            for x in items:
                step(home, optimizer, loss_of, x)
            return
        for micro, x in gradsync.sync_every(home, steps, items):
            micro.backward(loss_of(home, x))
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()

    window(0, sum_of_models)
    with pytest.raises(GradSyncError) as raised:
        window(0, odd)
    for number in (1, 2):
        optimizer.zero_grad()
        window(number, sum_of_models)
    torch.testing.assert_close(dict(model.named_parameters()), expected[-1], rtol=0, atol=1e-10)
    return str(raised.value)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(
    ("odd", "advice"), [(checkpointed_twice, "use_reentrant=False|static_graph out"), (sparse_by_function, "nn.Embedding")]
)
def test_what_the_reducer_refuses_is_said_and_nothing_of_it_stays(ranks, odd, advice, wrap):
    for how, steps in (("accumulating", 1), ("accumulating", 2), ("sync_every", 2)):
        for said in ranks(2).run(refused, odd, wrap, how, steps):
            assert re.search(advice, said), said


def without_values(wrap: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    home = DDP(model) if wrap == "ddp" else model
    model.append(nn.Linear(2, 2, device="meta"))
    step = accumulating(steps=2)(lambda home, optimizer, x: inside(home)[0](x).sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GradSyncError, match="meta device.*to_empty"):
        step(home, optimizer, torch.ones(1, 3))
    model[1].requires_grad_(False)
    step(home, optimizer, torch.ones(1, 3))
    step.reset()


@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_a_parameter_without_values_is_refused(ranks, wrap):
    ranks(2).run(without_values, wrap)
