"""What each micro-batch sends, on every engine."""

from __future__ import annotations

import pytest

from tests.support.homes import HOMES, home_of
from tests.support.training import Run
from tests.support.wire import Wire

# What the three micro-batches of a window send, and a flush after two. Three groups: two blocks and the root. A gather
# each in forward, and for the blocks in backward again; a reduction a group. A flush adds the ranks' agreement.
# FSDP2 adds one all-reduce, of a byte a parameter: whether any rank used it.
WIRE = {
    "ddp": [{}, {}, {"all_reduce default_pg": 1}, {"all_reduce default_pg": 2}],
    "replicate": [{}, {}, {"all_reduce default_pg": 1}, {"all_reduce default_pg": 2}],
    "replicate_fsdp": [{}, {}, {"all_reduce default_pg": 4}, {"all_reduce default_pg": 5}],
    "fsdp1_full": [
        {"all_gather default_pg": 5},
        {"all_gather default_pg": 5},
        {"all_gather default_pg": 5, "all_reduce default_pg": 3},
        {"all_reduce default_pg": 4},
    ],
    "fsdp1_grad_op": [{"all_gather default_pg": 3}, {}, {"all_reduce default_pg": 3}, {"all_reduce default_pg": 4}],
    "fsdp1_no_shard": [{}, {}, {"all_reduce default_pg": 3}, {"all_reduce default_pg": 4}],
    "fsdp2": [
        {"all_gather default_pg": 5},
        {"all_gather default_pg": 5},
        {"all_gather default_pg": 5, "all_reduce default_pg": 4},
        {"all_reduce default_pg": 5},
    ],
    # set_reshard_after_backward(False): gathered once a window, and not again until the update.
    "fsdp2_gathered": [{"all_gather default_pg": 3}, {}, {"all_reduce default_pg": 4}, {"all_reduce default_pg": 5}],
    "fsdp2_each": [
        *[{"all_gather default_pg": 5, "all_reduce default_pg": 4}] * 3,
        {"all_reduce default_pg": 5},
    ],
    # gloo reduce-scatters by an all-reduce, so that "all_reduce shards" is the reduce-scatter.
    "hsdp_window": [
        {"all_gather shards": 5},
        {"all_gather shards": 5},
        {"all_gather shards": 5, "all_reduce shards": 3, "all_reduce replicas": 3, "all_reduce default_pg": 1},
        {"all_reduce shards": 3, "all_reduce replicas": 3, "all_reduce default_pg": 2},
    ],
    "hsdp_shard": [
        {"all_gather shards": 5, "all_reduce shards": 3},
        {"all_gather shards": 5, "all_reduce shards": 3},
        {"all_gather shards": 5, "all_reduce shards": 3, "all_reduce replicas": 3, "all_reduce default_pg": 1},
        {"all_reduce shards": 3, "all_reduce replicas": 3, "all_reduce default_pg": 2},
    ],
    "hsdp_each": [
        *[{"all_gather shards": 5, "all_reduce shards": 3, "all_reduce replicas": 3, "all_reduce default_pg": 1}] * 3,
        {"all_reduce shards": 3, "all_reduce replicas": 3, "all_reduce default_pg": 2},
    ],
}


def window(engine: str, mode: str = "calls") -> list[dict[str, int]]:
    """What each call of the third window sends, and what a flush in the fourth does."""
    home = home_of(engine)
    run = Run(home)
    for index in range(6):
        run.step(home.model, run.optimizer, index)
    wire, sent = Wire(), []
    for index in range(3):
        run.step(home.model, run.optimizer, index)
        sent.append(wire.look())
    for index in range(2):
        run.step(home.model, run.optimizer, index)
    wire.look()
    run.step.flush()
    return [*sent, wire.look()]


@pytest.mark.parametrize("engine", WIRE)
def test_what_a_window_sends(ranks, engine):
    """Held micro-batches reduce nothing, the boundary each group once, and a flush without a backward as much."""
    for sent in ranks(HOMES[engine].ranks).run(window, engine):
        assert sent == WIRE[engine]
