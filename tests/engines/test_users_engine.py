"""An engine that a user writes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.engines import Engine, register
from tests.support.compare import assert_equal_states
from tests.support.homes import Home
from tests.support.models import net
from tests.support.training import Run, reference


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
        self._ring.waits = False

    def reduce(self, table=()):
        for parameter in self.parameters:
            if parameter.grad is not None:
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
