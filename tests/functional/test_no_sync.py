"""`no_sync` and `sync_gradients` in loops of one's own."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
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
