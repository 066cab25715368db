"""Ranks that use different parameters of one group of FSDP2: each gets the mean of its own gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.support.compare import assert_equal_state
from tests.support.homes import mesh
from tests.support.loops import by_sync_gradients, calls, over, plain, sync_every
from tests.support.reference import cut, micro_batch, states

STEPS, LR, DECAY = 2, 0.1, 0.1


class Heads(nn.Module):
    """A body and three heads, of which the last is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(3, 4).double()
        self.heads = nn.ModuleList(nn.Linear(4, 1).double() for _ in range(3))

    def forward(self, head: int, x: torch.Tensor) -> torch.Tensor:
        return self.heads[head](self.body(x)).square().mean()


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


def trained(wrap: Callable, loop: Callable, head: Callable, lengths: tuple[int, ...]) -> dict:
    """The parameters in the end. The last head has no gradient at any step, because no rank has used it."""
    rank, model = dist.get_rank(), wrap(Heads())
    inner = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=DECAY)
    seen: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(inner.heads[2].weight.grad))
    items = [(rank, index) for index in range(lengths[rank])]
    loop(STEPS, model, optimizer, lambda item: model(head(*item), micro_batch(*item)), items)
    assert seen == [None] * len(cut(lengths, STEPS))
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in inner.named_parameters()}
    return {name: p.detach().clone() for name, p in whole.items()}


def expected(head: Callable, lengths: tuple[int, ...]) -> dict:
    def loss_of_window(model, window):
        return torch.stack([model(head(*item), micro_batch(*item)) for item in window]).mean()

    return states(Heads(), cut(lengths, STEPS), loss_of_window, lr=LR, decay=DECAY)[-1]


@pytest.mark.parametrize("lengths", [(4, 4), (5, 4), (5, 2)])
@pytest.mark.parametrize("head", [own_head, in_turns, only_on_rank_one])
@pytest.mark.parametrize("loop", [over, sync_every])
@pytest.mark.parametrize("wrap", [bare, ddp_that_finds_unused, fsdp2, hsdp, hsdp_of_replicas, replicated])
def test_ranks_that_use_different_parameters_of_a_group(ranks, wrap, loop, head, lengths):
    for came in ranks(2).run(trained, wrap, loop, head, lengths):
        assert_equal_state(came, expected(head, lengths), 1e-12)


@pytest.mark.parametrize("head", [own_head, in_turns, only_on_rank_one])
@pytest.mark.parametrize("loop", [over, calls])
@pytest.mark.parametrize(("wrap", "sync"), [(fsdp2, "each"), (replicated, "each"), (hsdp, "shard")])
def test_with_another_sync(ranks, wrap, sync, loop, head):
    for came in ranks(2).run(trained, wrap, partial(loop, sync=sync), head, (5, 5)):
        assert_equal_state(came, expected(head, (5, 5)), 1e-12)


@pytest.mark.parametrize("head", [own_head, in_turns, only_on_rank_one])
@pytest.mark.parametrize("loop", [plain, by_sync_gradients])
@pytest.mark.parametrize("wrap", [fsdp2, hsdp, replicated])
def test_with_backwards_of_the_users_own(ranks, wrap, loop, head):
    for came in ranks(2).run(trained, wrap, loop, head, (4, 4)):
        assert_equal_state(came, expected(head, (4, 4)), 1e-12)
