"""Scenarios x engines: the same numbers everywhere, and each hole with the error that stands there.

The same of ranks of unequal length is in tests/uneven/test_table.py.
"""

from __future__ import annotations

import pytest

from tests.engines import scenarios
from tests.support.homes import HOMES
from tests.support.training import cell

FSDP1 = [name for name in HOMES if name.startswith("fsdp1")]
NOBODY = scenarios.a_parameter_that_nobody_used

# Where a scenario cannot be had on an engine: what the error says instead.
HOLES = {
    **{
        (engine, scenarios.amp_with_an_inf_on_one_rank): "either DTensors or plain gradients"
        for engine in ("fsdp2_no_root", "ddp_fsdp2")
    },
    **{(engine, NOBODY): "find_unused_parameters=True" for engine in ("ddp", "replicate", "ddp_fsdp2")},
}

# Where it means something else, and no error says so.
ELSEWHERE = {
    # `no_sync` and `sync_gradients` have nothing to do where no engine is, and gradsync has put none there yet.
    **{
        (engine, one): "no engine"
        for engine in ("bare", "fsdp1_no_root", "fsdp2_no_root")
        for one in (scenarios.no_sync_then_sync_gradients, scenarios.no_sync_then_backward)
    },
    # Parameters kept gathered beyond an update are stale: accumulating sees to that, a boundary of one's own has to.
    ("fsdp2_gathered", scenarios.no_sync_then_backward): "stale",
    # The gradient of a flat parameter is one tensor, with zeros where nothing came.
    **{(engine, NOBODY): "zeros" for engine in FSDP1},
}

CELLS = [(engine, one) for engine in HOMES for one in scenarios.SCENARIOS if (engine, one) not in ELSEWHERE]


@pytest.mark.parametrize(("engine", "scenario"), CELLS)
def test_the_parameters_are_those_of_one_big_batch(ranks, engine, scenario):
    """After each update, on every rank, to 1e-10 in float64."""
    hole = HOLES.get((engine, scenario))
    ranks(HOMES[engine][0]).run(cell, engine, scenario, hole, scenario is NOBODY, limit=30)
