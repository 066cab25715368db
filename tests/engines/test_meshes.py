"""Beyond data parallel: several meshes, and groups of a part of the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.engines import attach, find
from gradsync.functional import all_finite, clip, discard, norm, normalise
from tests.support.compare import assert_equal_states
from tests.support.homes import Home, home_of, mesh
from tests.support.models import net
from tests.support.reference import mean_of
from tests.support.training import DECAY, LR, Run, data, reference


def gradients_of_several_meshes() -> None:
    """The norm of all, DTensors of two meshes with plain ones beside them, is that of the whole gradients."""
    home = home_of("fsdp2_tp")
    beside = nn.Parameter(torch.ones(3, dtype=torch.float64))
    engines = attach([home.model])
    with gradsync.no_sync(home.model):
        mean_of(home.model(data(home.rank, 0))).backward()
    gradsync.sync_gradients(home.model)
    assert engines[0].group.size() == 2
    parameters = [*home.model.parameters(), beside]
    beside.grad = torch.full((3,), 0.25, dtype=torch.float64)
    assert len({getattr(p.grad, "device_mesh", None) for p in parameters}) == 3

    def whole():
        full = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parameters]
        return torch.cat([gradient.flatten() for gradient in full])

    before = whole()
    torch.testing.assert_close(norm(parameters), before.norm(), rtol=1e-12, atol=0)
    normalise(parameters, 0.5)
    torch.testing.assert_close(whole(), before * 0.5)
    total = clip(parameters, 0.01)
    torch.testing.assert_close(total, before.norm() * 0.5, rtol=1e-12, atol=0)
    torch.testing.assert_close(whole().norm(), torch.tensor(0.01, dtype=torch.float64), rtol=1e-3, atol=0)
    assert all_finite(parameters)
    if dist.get_rank() == 3:
        home.model.first.up.weight.grad.to_local()[0] = float("nan")
    assert not all_finite(parameters)
    discard(parameters)
    assert all(p.grad is None for p in parameters)


def partial_reductions_of_the_users_own() -> None:
    """`sync_gradients` after micro-batches that torch's own switch has reduce-scattered only."""
    home = home_of("hsdp_window")
    optimizer = torch.optim.SGD(home.model.parameters(), lr=LR, weight_decay=DECAY)
    home.model.set_requires_all_reduce(False)
    for index in range(3):
        (mean_of(home.model(data(home.rank, index))) / 3).backward()
    gradsync.sync_gradients(home.model)
    optimizer.step()
    assert_equal_states([home.full()], reference(home, [range(3)]))


def hybrid_on_a_part_of_the_ranks() -> None:
    """HSDP within tensor parallelism: the table of a window is summed over the data-parallel ranks alone."""
    from torch.distributed.fsdp import fully_shard

    three = mesh((2, 1, 2), ("outer", "inner", "tensor"))
    model = net()
    fully_shard(model, mesh=three["outer", "inner"])
    home = Home(model, three["outer"].get_local_rank(), 2)
    (engine,) = find([model])
    assert dist.get_process_group_ranks(engine.group) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    run = Run(home)
    run.over(5)
    assert_equal_states(run.states, reference(home, [range(3), range(3, 5)]))


def tensor_parallel_without_data_parallel() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    part = mesh((2, 2), ("data", "tensor"))["tensor"]
    model = net()
    parallelize_module(model.first, part, plan)
    with pytest.raises(gradsync.GradSyncError, match="Call fully_shard or replicate on the model"):
        Run(Home(model))(0)


@pytest.mark.parametrize(
    "case",
    [
        gradients_of_several_meshes,
        partial_reductions_of_the_users_own,
        hybrid_on_a_part_of_the_ranks,
        tensor_parallel_without_data_parallel,
    ],
)
def test_beyond_data_parallel(ranks, case):
    """Norms, clipping and discarding; groups of a part of the ranks."""
    ranks(4).run(case)
