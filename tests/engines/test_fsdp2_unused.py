"""Ranks that use different parameters of one group of FSDP2: each gets the mean of its own gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import gradsync
from tests.support.compare import assert_equal_state
from tests.support.homes import mesh

STEPS, LR = 2, 0.1


class Heads(nn.Module):
    """A body and three heads, of which the last is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(3, 4).double()
        self.heads = nn.ModuleList(nn.Linear(4, 1).double() for _ in range(3))

    def forward(self, head: int, x: torch.Tensor) -> torch.Tensor:
        return self.heads[head](self.body(x)).square().mean()


def batch(rank: int, index: int) -> torch.Tensor:
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + index))


def own_head(rank: int, index: int) -> int:  # noqa: ARG001 - the same in each micro-batch
    return rank % 2


def in_turns(rank: int, index: int) -> int:
    return (rank + index) % 2


def only_on_rank_one(rank: int, index: int) -> int:
    return int(rank == 1 and index == 0)


def fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def hsdp(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh((1, 2), ("replicas", "shards")))


def hsdp_of_replicas(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh((2, 1), ("replicas", "shards")))


def replicated(model: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(model)


def bare(model: nn.Module) -> nn.Module:
    return model


def ddp_that_finds_unused(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def over(model, optimizer, items, head, sync):
    @gradsync.accumulating(steps=STEPS, sync=sync)
    def step(model, optimizer, item):
        return model(head(*item), batch(*item))

    for item in step.over(items):
        step(model, optimizer, item)


def calls(model, optimizer, items, head, sync):
    @gradsync.accumulating(steps=STEPS, sync=sync)
    def step(model, optimizer, item):
        return model(head(*item), batch(*item))

    for item in items:
        step(model, optimizer, item)
    step.flush()


def sync_every(model, optimizer, items, head, sync):  # noqa: ARG001 - it has none
    for step, item in gradsync.sync_every(model, STEPS, items):
        step.backward(model(head(*item), batch(*item)))
        if step.last:
            assert getattr(model, "module", model).heads[2].weight.grad is None, "no rank has used it"
            optimizer.step()
            optimizer.zero_grad()


def trained(wrap: Callable, loop: Callable, head: Callable, lengths: tuple[int, ...], sync: str) -> dict:
    rank, model = dist.get_rank(), Heads()
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=0.1)
    loop(model, optimizer, [(rank, index) for index in range(lengths[rank])], head, sync)
    model = getattr(model, "module", model)
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return {name: p.detach().clone() for name, p in whole.items()}


def expected(head: Callable, lengths: tuple[int, ...]) -> dict:
    """One process and plain torch: the mean of each window's micro-batches of all ranks."""
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=0.1)
    for start in range(0, max(lengths), STEPS):
        window = [(r, i) for r, n in enumerate(lengths) for i in range(start, min(start + STEPS, n))]
        torch.stack([model(head(*item), batch(*item)) for item in window]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("lengths", [(4, 4), (5, 4), (5, 2)])
@pytest.mark.parametrize("head", [own_head, in_turns, only_on_rank_one])
@pytest.mark.parametrize("loop", [over, sync_every])
@pytest.mark.parametrize("wrap", [bare, ddp_that_finds_unused, fsdp2, hsdp, hsdp_of_replicas, replicated])
def test_ranks_that_use_different_parameters_of_a_group(ranks, wrap, loop, head, lengths):
    for came in ranks(2).run(trained, wrap, loop, head, lengths, "window"):
        assert_equal_state(came, expected(head, lengths), 1e-12)


@pytest.mark.parametrize("head", [own_head, in_turns, only_on_rank_one])
@pytest.mark.parametrize("loop", [over, calls])
@pytest.mark.parametrize(("wrap", "sync"), [(fsdp2, "each"), (replicated, "each"), (hsdp, "shard")])
def test_with_another_sync(ranks, wrap, sync, loop, head):
    for came in ranks(2).run(trained, wrap, loop, head, (5, 5), sync):
        assert_equal_state(came, expected(head, (5, 5)), 1e-12)


def plain(model, optimizer, items, head, sync):  # noqa: ARG001 - it has none
    for step, item in gradsync.sync_every(model, STEPS, items):
        (model(head(*item), batch(*item)) / step.size).backward()
        if step.last:
            optimizer.step()
            optimizer.zero_grad()


def by_sync_gradients(model, optimizer, items, head, sync):  # noqa: ARG001 - it has none
    for start in range(0, len(items), STEPS):
        with gradsync.no_sync(model):
            for item in items[start : start + STEPS]:
                (model(head(*item), batch(*item)) / STEPS).backward()
        gradsync.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("head", [own_head, in_turns, only_on_rank_one])
@pytest.mark.parametrize("loop", [plain, by_sync_gradients])
@pytest.mark.parametrize("wrap", [fsdp2, hsdp, replicated])
def test_with_backwards_of_the_users_own(ranks, wrap, loop, head):
    for came in ranks(2).run(trained, wrap, loop, head, (4, 4), "window"):
        assert_equal_state(came, expected(head, (4, 4)), 1e-12)
