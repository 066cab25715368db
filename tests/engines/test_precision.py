"""Mixed precision and offloading, and layers that are unfrozen later."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.engines import find
from tests.support.compare import assert_equal_states
from tests.support.homes import HOMES, Home, home_of
from tests.support.models import Partly, net
from tests.support.reference import mean_of
from tests.support.training import DECAY, LR, Run, data, reference


def mixed_precision_with_a_module_that_never_ran() -> None:
    """torch 2.13 alone raises AttributeError as such a held backward ends. Held gradients add up in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Partly()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model.one, model.two):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    @gradsync.accumulating(16)
    def step(model, optimizer, index):
        return model(data(dist.get_rank(), index).float()).float().square().mean()

    for index in range(31):
        model.both = index >= 24
        step(model, optimizer, index)
        if index == 20:
            (engine,) = find([model])
            assert {p.unsharded_accumulated_grad.dtype for g in engine._groups[:1] for p in g.fsdp_params} <= {torch.float32}
    step.flush()


def held_gradients_add_up_in_float32() -> None:
    """As the reduction is: the error of 64 micro-batches in bfloat16 stays that of one."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def run(steps):
        torch.manual_seed(0)
        model = nn.Linear(64, 8)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        @gradsync.accumulating(steps)
        def step(model, optimizer):
            return model(torch.linspace(0.1, 1.7, 64).repeat(4, 1)).float().square().mean()

        before = model.weight.full_tensor().clone()
        for _ in range(steps):
            step(model, optimizer)
        return before - model.weight.full_tensor()

    once, often = run(1), run(64)
    assert ((often - once).norm() / once.norm()).item() < 1e-5


def cpu_offload() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = net()
    for block in (model.first, model.second, model):
        fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=False))
    home = Home(model, dist.get_rank(), dist.get_world_size())
    run = Run(home, clip_norm=1e9)
    run.over(5)
    assert_equal_states(run.states, reference(home, [range(3), range(3, 5)]))


@pytest.mark.parametrize("case", [mixed_precision_with_a_module_that_never_ran, held_gradients_add_up_in_float32, cpu_offload])
def test_fsdp2_in_policies(ranks, case):
    """Mixed precision and CPU offload."""
    ranks(2).run(case)


def unfreezing(engine: str) -> None:
    home = home_of(engine)
    second = [p for name, p in home.model.named_parameters() if "second" in name]
    for p in second:
        p.requires_grad_(requires_grad=False)
    run = Run(home)
    for index in range(3):
        run(index)
    for p in second:
        p.requires_grad_(requires_grad=True)
    for index in range(3, 6):
        run(index)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=DECAY)
    expected = []
    for window in (range(3), range(3, 6)):
        model.second.requires_grad_(requires_grad=bool(expected))
        items = [(rank, index) for rank in range(home.size) for index in window]
        (sum(mean_of(model(data(*item))) for item in items) / len(items)).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert_equal_states(run.states, expected)


@pytest.mark.parametrize("engine", ["fsdp2", "hsdp_shard"])
def test_parameters_that_are_unfrozen_later(ranks, engine):
    """Gradual unfreezing, between windows."""
    ranks(HOMES[engine].ranks).run(unfreezing, engine)
