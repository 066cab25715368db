"""`no_sync` and `sync_gradients` in loops of one's own."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import mean_loss, micro_batch
from tests.support.wire import num_collectives


def sync_gradients_alone() -> None:
    """A loop of one's own: hold everything, then synchronise; one rank has nothing at all."""
    rank = dist.get_rank()
    for kwargs in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        model = small_model()
        home = DDP(model, **kwargs)
        with gradsync.no_sync(home):
            if rank == 0:
                for i in range(3):
                    mean_loss(home, micro_batch(0, i)).backward()
        gradsync.sync_gradients(home)
        twin = small_model()
        expected = torch.autograd.grad(
            sum(mean_loss(twin, micro_batch(0, i)) for i in range(3)) / 2, list(twin.parameters()))
        assert_equal_updates([[p.grad for p in model.parameters()]], [list(expected)])


def test_sync_gradients_alone(ranks):
    ranks(2).run(sync_gradients_alone)


def sync_gradients_of_a_frozen_model() -> int:
    """One of two models has been frozen since it was put on its engine: how many collectives it costs."""
    models = [small_model(), small_model()]
    homes = [DDP(model) for model in models]
    models[1].requires_grad_(False)
    counts = []
    for several in (homes[:1], homes[:1], homes):  # the first time has more
        with gradsync.no_sync(*several):
            mean_loss(homes[0], micro_batch(dist.get_rank(), 0)).backward()
        before = num_collectives()
        gradsync.sync_gradients(*several)
        counts.append(num_collectives() - before)
    assert all(p.grad is None for p in models[1].parameters())
    return counts[2] - counts[1]


def test_sync_gradients_leaves_a_frozen_model_alone(ranks):
    assert ranks(2).run(sync_gradients_of_a_frozen_model) == [0, 0]


def no_sync_everywhere() -> None:
    """Local gradients in it, the flag restored after it, nested and after an exception."""
    rank = dist.get_rank()
    for make in (lambda m: DDP(m), lambda m: nn.Sequential(DDP(m)), lambda m: torch.compile(DDP(m), backend="eager")):
        model = small_model()
        home = make(model)
        inner = next(m for m in home.modules() if isinstance(m, DDP))
        before = num_collectives()
        with gradsync.no_sync(home):
            with gradsync.no_sync(home):
                mean_loss(home, micro_batch(rank, 0)).backward()
            assert not inner.require_backward_grad_sync
            mean_loss(home, micro_batch(rank, 1)).backward()
        assert num_collectives() == before and inner.require_backward_grad_sync
        with contextlib.suppress(ZeroDivisionError), gradsync.no_sync(home):
            raise ZeroDivisionError
        assert inner.require_backward_grad_sync
        with gradsync.no_sync(home, enabled=False):
            assert inner.require_backward_grad_sync
        model.zero_grad()


def test_no_sync_everywhere(ranks):
    ranks(2).run(no_sync_everywhere)


def forward_and_backward(home, x) -> None:
    with gradsync.no_sync(home):
        mean_loss(home, x).backward()


def backward_alone(home, x) -> None:
    loss = mean_loss(home, x)
    with gradsync.no_sync(home):
        loss.backward()


def forward_alone(home, x) -> None:
    with gradsync.no_sync(home):
        loss = mean_loss(home, x)
    loss.backward()


def by_hand(home, optimizer, held: list) -> list:
    """Three windows of one micro-batch, with what is held in the first; the micro-batches of each."""
    for i in range(3):
        mean_loss(home, micro_batch(dist.get_rank(), 1 + i)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [[*held, (0, 1), (1, 1)], [(0, 2), (1, 2)], [(0, 3), (1, 3)]]


def by_accumulating(home, optimizer, held: list) -> list:
    """Two windows of two, without what is held."""
    optimizer.zero_grad()
    step = gradsync.accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x) * 2)
    for i in range(4):
        step(home, optimizer, micro_batch(dist.get_rank(), 1 + i))
    return [[(r, i + k) for r in range(2) for k in range(2)] for i in (1, 3)]


def static_graph_held_first(inside, then, uneven: bool = False) -> None:
    """The very first backward of a static graph is held, by torch's reckoning a part of the graph: what comes is exact."""
    rank = dist.get_rank()
    home, twin = DDP(small_model(), static_graph=True), small_model()
    optimizer = Recorder(home.parameters(), lr=0.0)
    inside(home, micro_batch(rank, 0))
    if rank == 0 and uneven:
        forward_and_backward(home, micro_batch(0, 9))
    expected = []
    for window in then(home, optimizer, [(0, 0), (1, 0), *([(0, 9)] if uneven else [])]):
        total = sum(mean_loss(twin, micro_batch(*place)) for place in window) / 2
        expected.append(list(torch.autograd.grad(total, list(twin.parameters()))))
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize("then", [by_hand, by_accumulating])
def test_no_sync_around_the_very_first_backward_of_a_static_graph(ranks, then):
    for inside in (forward_and_backward, backward_alone, forward_alone):
        ranks(2).run(static_graph_held_first, inside, then)
    ranks(2).run(static_graph_held_first, forward_and_backward, then, True)
