"""Ranks of unequal length on every engine: the same numbers everywhere, and each hole with the error that stands there."""

from __future__ import annotations

import pytest

from tests.support.homes import HOMES
from tests.support.training import cell
from tests.uneven import scenarios

# In whose forward no rank waits for another; on the others a rank that has run out repeats its last call.
SILENT = ["none", "bare", "ddp", "ddp_find_unused", "replicate"]
OTHERS = [engine for engine in HOMES if engine not in SILENT]

# Where a scenario cannot be had on an engine: what the error says instead.
HOLES = {
    **{(engine, scenarios.uneven_amp): "either DTensors or plain gradients" for engine in ("fsdp2_no_root", "ddp_fsdp2")},
    # A rank that has never had an item cannot repeat its last.
    **{
        (engine, scenarios.uneven_over_from_nothing): "needs at least one item in step.over where .*, but rank 0.* has none"
        for engine in OTHERS
    },
    **{
        (engine, scenarios.uneven_skip_first): r"first micro-batch of step must be a good one .*, but rank \d dropped it"
        for engine in OTHERS
    },
    **{
        (engine, scenarios.uneven_iterator_from_nothing): "needs at least one item in sync_every, .*, but rank 0 has none"
        for engine in HOMES
        if engine != "none"
    },
}


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
@pytest.mark.parametrize("engine", HOMES)
def test_the_parameters_are_those_of_one_big_batch(ranks, engine, scenario):
    """After each update, on every rank, to 1e-10 in float64."""
    ranks(HOMES[engine][0]).run(cell, engine, scenario, HOLES.get((engine, scenario)), limit=30)
