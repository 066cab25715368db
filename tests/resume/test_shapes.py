"""States of parameters of every shape, type and place."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)  # fmt: skip
from torch.distributed.tensor import Shard

from tests.resume.engine_runs import flush, resumed_anywhere, updates
from tests.support.compare import assert_equal_states
from tests.support.homes import Home, mesh
from tests.support.models import Odd
from tests.support.reference import mean_of
from tests.support.training import data


def _fsdp1(dtype=torch.float64, shape=None, odd=None, **options):
    def make():
        if shape:
            options["device_mesh"] = mesh(shape, ("replicas", "shards"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FullyShardedDataParallel(Odd(**odd or {}).to(dtype), device_id=torch.device("cpu"), **options)
        return Home(model, dist.get_rank(), dist.get_world_size())

    return make


def _fsdp2(dtype=torch.float64, shape=None, odd=None, **options):
    def make():
        model = Odd(**odd or {}).to(dtype)
        where = mesh(shape, ("replicas", "shards")) if shape else mesh((dist.get_world_size(),), ("data",))
        fully_shard(model, mesh=where, **options)
        return Home(model, dist.get_rank(), dist.get_world_size(), {"sync": "shard"} if shape else {})

    return make


FROZEN = {"frozen": True}
LOW = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32), "dtype": torch.float32}


LOW2 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "dtype": torch.float32}


OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


# name: (ranks, how the model gets there, what it is like)
KINDS = {
    "fsdp1": (2, _fsdp1, {}),
    "fsdp1 orig": (2, _fsdp1, {"use_orig_params": True}),
    "fsdp1 orig, frozen": (2, _fsdp1, {"use_orig_params": True, "odd": FROZEN}),
    "fsdp1 bf16": (2, _fsdp1, LOW),
    "fsdp1 bf16 orig": (2, _fsdp1, {"use_orig_params": True, **LOW}),
    # where parameters are shared, torch 2.13 alone raises in the second micro-batch of a `no_sync`
    "fsdp1 bf16 orig, not sharded": (
        2, _fsdp1, {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD, "odd": {"tied": False}, **LOW}
    ),
    "fsdp1 hybrid": (4, _fsdp1, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "shape": (2, 2)}),
    "fsdp1 hybrid orig": (
        4, _fsdp1, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "shape": (2, 2), "use_orig_params": True}
    ),
    "fsdp2": (2, _fsdp2, {}),
    "fsdp2, frozen": (2, _fsdp2, {"odd": FROZEN}),
    "fsdp2 bf16": (2, _fsdp2, LOW2),
    "fsdp2 offloaded": (2, _fsdp2, OFFLOADED),
    "hsdp": (4, _fsdp2, {"shape": (2, 2)}),
    "hsdp, frozen": (4, _fsdp2, {"shape": (2, 2), "odd": FROZEN}),
    "hsdp bf16": (4, _fsdp2, {"shape": (2, 2), **LOW2}),
    "hsdp offloaded": (4, _fsdp2, {"shape": (2, 2), **OFFLOADED}),
    "hsdp of one shard": (4, _fsdp2, {"shape": (4, 1)}),
    "hsdp of one replica": (4, _fsdp2, {"shape": (1, 4)}),
    "hsdp by columns": (
        4, _fsdp2, {"shape": (2, 2), "shard_placement_fn": lambda p: Shard(p.dim() == 2 and p.shape[1] % 2 == 0)}
    ),
}  # fmt: skip


def of_kind(kind: str, sync: str | None = None) -> None:
    _, make, options = KINDS[kind]
    dtype = options.get("dtype", torch.float64)
    states = resumed_anywhere(make(**options), flush, sync, lambda model, rank, index: model(data(rank, index).to(dtype)))
    bare, size = Odd(**options.get("odd") or {}).double(), dist.get_world_size()
    expected = updates(bare, lambda model, *item: mean_of(model(data(*item))), size)
    states = [{name: p.double() for name, p in state.items()} for state in states]
    assert_equal_states(states, expected, 1e-10 if dtype is torch.float64 else 0.2)  # bf16 has 8 bits


@pytest.mark.parametrize("sync", [None, "each"])
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_types_and_places(ranks, kind, sync):
    """Sizes that nothing divides, shared and frozen parameters, bfloat16, offloading, other meshes and dimensions."""
    ranks(KINDS[kind][0]).run(of_kind, kind, sync)
