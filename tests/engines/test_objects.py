"""Engines by themselves: what they keep alive, what they make, and what a failure leaves of them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.engines import objects as cases
from tests.support.homes import HOMES

FSDP1 = [name for name in HOMES if name.startswith("fsdp1")]
CAN_SHARD = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.13 and later
SHARD = pytest.param("hsdp_shard", marks=pytest.mark.skipif(not CAN_SHARD, reason=f"an error under torch {torch.__version__}"))
FSDP2 = ["fsdp2", "fsdp2_gathered", "fsdp2_no_root", "replicate_fsdp", "hsdp_window", SHARD]


@pytest.mark.parametrize("engine", [*FSDP1, *FSDP2])
def test_who_drops_a_model_has_dropped_it(ranks, engine):
    """With its optimizer and the last batch, also where the engine is kept by the optimizer, and the model knows that."""
    ranks(HOMES[engine][0]).run(cases.dropped, engine)


def test_an_engine_outlives_its_model(ranks):
    """FSDP1 itself keeps what is inside of its root."""
    ranks(2).run(cases.outlived, "fsdp2")


def test_a_mesh_gets_one_group(ranks):
    """However many engines are made on it: HSDP beside tensor parallelism."""
    ranks(4).run(cases.one_group_a_mesh)


@pytest.mark.parametrize("where", ["forward", "between", "backward"])
@pytest.mark.parametrize("engine", FSDP2)
def test_a_micro_batch_that_failed_leaves_nothing(ranks, engine, where):
    ranks(HOMES[engine][0]).run(cases.clean_after, engine, where)


def test_shards_need_a_torch_that_can_reduce_them(ranks):
    ranks(4).run(cases.shard_before_2_13)


def test_a_hybrid_reduction_is_waited_for(ranks):
    """By the stream that the optimizer runs on, and before the gradient is cast."""
    ranks(4).run(cases.fsdp1_hybrid_waits_for_its_replicas)
