"""An engine that a user writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.engines import Engine, register
from tests.support.compare import assert_equal_state, assert_equal_states
from tests.support.homes import Home
from tests.support.loops import over, sync_every
from tests.support.models import net, small_model
from tests.support.reference import cut, mean_loss, micro_batch, states, window_mean
from tests.support.training import Run, reference

LENGTHS = (5, 2)


class Ring(nn.Module):
    """Somebody's wrapper: averages each gradient as it arrives, unless told to wait."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.waits = module, False
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: nn.Parameter) -> None:
        if not self.waits:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def no_sync(self):
        raise NotImplementedError


class RingEngine(Engine):
    def __init__(self, ring: Ring) -> None:
        super().__init__(dist.group.WORLD, list(ring.parameters()))
        self._ring = ring

    def hold(self) -> bool:
        found, self._ring.waits = self._ring.waits, True
        return found

    def restore(self, found: bool) -> None:
        self._ring.waits = found

    def arm(self, loss) -> None:
        """Ranks may reach different parameters, in another order: they synchronise after the backward."""

    def finish(self) -> None:
        self.reduce()

    def reduce(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.group.size()


def a_users_engine() -> None:
    home = Home(Ring(net()), dist.get_rank(), dist.get_world_size())
    with pytest.raises(gradsync.GradSyncError, match=r"does not know tests\.engines\.test_users_engine\.Ring.*register\(Ring, "):
        Run(home)(0)
    register(Ring, RingEngine)
    run = Run(home)
    run.over(5)
    for index in range(2):
        run(index)
    run.step.flush()
    run.note(2)
    assert_equal_states(run.states, reference(home, [range(3), range(3, 5), range(2)]))


def test_a_users_engine_is_twenty_lines(ranks):
    """Unknown ones are refused by name, and say how to register."""
    ranks(2).run(a_users_engine)


def on_uneven_ranks(loop: Callable) -> dict:
    rank, model = dist.get_rank(), small_model()
    home, optimizer = Ring(model), torch.optim.SGD(model.parameters(), lr=0.1)
    register(Ring, RingEngine)
    loop(2, home, optimizer, lambda i: mean_loss(home, micro_batch(rank, i)), range(LENGTHS[rank]))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("loop", [over, sync_every])
def test_a_users_engine_on_ranks_that_differ(ranks, loop):
    for came in ranks(2).run(on_uneven_ranks, loop):
        assert_equal_state(came, states(small_model(), cut(LENGTHS, 2), window_mean)[-1], 1e-12)
