"""What would be silently wrong on an engine is an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from tests.support.homes import home_of
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import mean_loss, micro_batch
from tests.support.training import Run


def a_plain_scaler_on_fsdp1() -> None:
    home = home_of("fsdp1_full")
    run = Run(home, scaler=torch.amp.GradScaler("cpu"), steps=1)
    with pytest.raises(gradsync.GradSyncError, match="Use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"):
        run(0)


def another_divide_factor() -> None:
    home = home_of("fsdp2")
    home.model.first.set_gradient_divide_factor(1.0)
    with pytest.raises(gradsync.GradSyncError, match="set_gradient_divide_factor was called"):
        Run(home)(0)


def tensor_parallel_in_a_ddp() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    inner = parallelize_module(small_model(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = DDP(inner, device_mesh=mesh["data"])
    with pytest.raises(gradsync.GradSyncError, match="is of a tensor-parallel model.*Use fully_shard, or replicate"):
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1), X)


def fully_shard_without_a_root() -> None:
    """torch's own words."""
    model = small_model()
    fully_shard([model[0], model[2]])
    with pytest.raises(RuntimeError, match="requires a single root module"):
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1), X)


@pytest.mark.parametrize(
    "case", [a_plain_scaler_on_fsdp1, another_divide_factor, tensor_parallel_in_a_ddp, fully_shard_without_a_root]
)
def test_what_would_be_silently_wrong_is_an_error(ranks, case):
    """Found by gradsync, because torch says nothing."""
    ranks(2).run(case)


X = micro_batch(0, 0)


class Wrapper(nn.Module):
    """Somebody's data parallel wrapper."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def no_sync(self):
        raise NotImplementedError


def trained(model, optimizer, x) -> None:
    gradsync.accumulating(2)(lambda model, optimizer, x: mean_loss(model, x))(model, optimizer, x)


def test_an_unknown_engine_is_an_error_and_not_a_silent_no_op():
    model = Wrapper(small_model())
    for call in (
        lambda: gradsync.no_sync(model),
        lambda: gradsync.sync_gradients(model),
        lambda: next(gradsync.sync_every(model, 2)),
        lambda: trained(model, Recorder(model.parameters()), X),
    ):
        with pytest.raises(gradsync.GradSyncError, match=r"does not know tests.engines.test_refused.Wrapper. Teach it with gradsync.engines.regis"):
            call()
