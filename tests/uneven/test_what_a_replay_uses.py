"""What only a replay has used counts as unused: its gradient is None, on whatever engine the parameter is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsync
from tests.support.compare import assert_equal_state
from tests.support.loops import over, plain, sync_every
from tests.support.reference import cut, micro_batch, states

# Rank 0 repeats its last item, which uses more than those of rank 1, where the loop needs that: once in a window, or more.
STEPS_OF = {(1, 3): 1, (2, 6): 2, (3, 9): 3}


class Extra(nn.Module):
    """Two layers, and an embedding that only items of rank 0 use."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.extra = nn.Embedding(4, 3, sparse=sparse).double()
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()

    def forward(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x + self.extra(torch.arange(len(x)) % 4) if rank == 0 else x)).square().mean()


def bare(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def sharded_in_part(model: nn.Module) -> nn.Module:
    fully_shard(model.first)
    return model


def ddp_around_shards(model: nn.Module) -> nn.Module:
    model._ddp_params_and_buffers_to_ignore = [f"first.{name}" for name, _ in model.first.named_parameters()]
    return ddp(sharded_in_part(model))


def trained(wrap: Callable, loop: Callable, sparse: bool, lengths: tuple[int, int]) -> tuple[list[bool], dict]:
    """At which steps the embedding had a gradient, and the parameters in the end."""
    rank, model = dist.get_rank(), Extra(sparse=sparse)
    home, seen = wrap(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.extra.weight.grad is not None))
    loop(STEPS_OF[lengths], home, optimizer, lambda i: home(rank, micro_batch(rank, i)), range(lengths[rank]))
    assert not model.extra.weight._post_accumulate_grad_hooks
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return seen, {name: p.detach().clone() for name, p in whole.items()}


# A DDP that looks for unused parameters needs a gradient of a sparse one on each rank, as torch does.
@pytest.mark.parametrize("lengths", STEPS_OF)
@pytest.mark.parametrize("loop", [over, sync_every, plain])
@pytest.mark.parametrize(
    ("wrap", "sparse"),
    [(bare, False), (bare, True), (ddp, False), (sharded_in_part, False), (sharded_in_part, True),
     (ddp_around_shards, False)],
)  # fmt: skip
def test_a_parameter_that_only_replays_have_used(ranks, wrap, loop, sparse, lengths):
    steps = STEPS_OF[lengths]

    def loss_of_window(model, window):
        losses = torch.stack([model(rank, micro_batch(rank, i)) for rank, i in window])
        return losses.sum() / (2 * steps) if loop is plain else losses.mean()  # a plain backward divides as by hand

    right = states(Extra(sparse=False), cut(lengths, steps), loss_of_window)[-1]
    for seen, came in ranks(2).run(trained, wrap, loop, sparse, lengths):
        assert seen == [True, False, False]
        assert_equal_state(came, right, 1e-12)


def read_after_each_backward() -> list[bool]:
    """A body may look at the gradients that it has: those of a replay are zeros, until the window synchronises."""
    rank, model = dist.get_rank(), sharded_in_part(Extra(sparse=False))
    zeros = []
    for step, i in gradsync.sync_every(model, 3, range(6 if rank == 1 else 3)):
        step.backward(model(rank, micro_batch(rank, i)))
        if not step.last:
            zeros.append(not model.last.weight.grad.any())
        else:
            model.zero_grad()
    return zeros


def test_a_body_that_reads_the_gradients_of_a_replay(ranks):
    assert ranks(2).run(read_after_each_backward) == [[False, False, True, True], [False] * 4]
