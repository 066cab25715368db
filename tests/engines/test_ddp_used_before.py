"""A DDP that its user has run by himself, before the first window and between windows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.compare import assert_equal_state
from tests.support.loops import by_sync_gradients, calls, over, plain, sync_every
from tests.support.models import small_model
from tests.support.reference import cut, mean_loss, micro_batch, states, window_mean

STEPS, LENGTHS = 2, (4, 4)


def ddp(model) -> DistributedDataParallel:
    return DistributedDataParallel(model)


def static(model) -> DistributedDataParallel:
    return DistributedDataParallel(model, static_graph=True)


def find_unused(model) -> DistributedDataParallel:
    return DistributedDataParallel(model, find_unused_parameters=True)


def trained(wrap: Callable, loop: Callable, own_backwards: int) -> dict:
    rank, model = dist.get_rank(), small_model()
    home, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(own_backwards):  # DDP orders its buckets after the first, in its next forward
        mean_loss(home, micro_batch(rank, 9)).backward()
    optimizer.zero_grad()
    loop(STEPS, home, optimizer, lambda i: mean_loss(home, micro_batch(rank, i)), range(LENGTHS[rank]))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("own_backwards", [1, 2])
@pytest.mark.parametrize("loop", [calls, over, sync_every, plain, by_sync_gradients])
@pytest.mark.parametrize("wrap", [ddp, static, find_unused])
def test_a_ddp_with_backwards_of_its_users(ranks, wrap, loop, own_backwards):
    for came in ranks(2).run(trained, wrap, loop, own_backwards):
        assert_equal_state(came, states(small_model(), cut(LENGTHS, STEPS), window_mean)[-1], 1e-12)
