"""Scenarios x engines: the same numbers everywhere, and each hole with the error that stands there."""

from __future__ import annotations

import pytest

from tests.engines.scenarios import SCENARIOS
from tests.support.homes import HOMES

# In whose forward no rank waits for another; on the others a rank that has run out repeats its last call.
SILENT = ["none", "bare", "ddp", "ddp_find_unused", "replicate"]
FSDP1 = [name for name in HOMES if name.startswith("fsdp1")]

# Where a scenario cannot be had on an engine: what the error says instead.
HOLES = {
    **{
        (engine, one): "either DTensors or plain gradients"
        for engine in ("fsdp2_no_root", "ddp_fsdp2")
        for one in ("amp_with_an_inf_on_one_rank", "uneven_amp")
    },
    ("ddp", "a_parameter_that_nobody_used"): "find_unused_parameters=True",
    ("replicate", "a_parameter_that_nobody_used"): "find_unused_parameters=True",
    ("ddp_fsdp2", "a_parameter_that_nobody_used"): "find_unused_parameters=True",
    # A rank that has never had an item cannot repeat its last.
    **{
        (engine, "uneven_over_from_nothing"): "needs at least one item in step.over where .*, but rank 0.* has none"
        for engine in HOMES
        if engine not in SILENT
    },
    **{
        (engine, "uneven_skip_first"): r"first micro-batch of step must be a good one .*, but rank \d dropped it"
        for engine in HOMES
        if engine not in SILENT
    },
    **{
        (engine, "uneven_iterator_from_nothing"): "needs at least one item in sync_every, .*, but rank 0 has none"
        for engine in HOMES
        if engine != "none"
    },
}

# Where it means something else, and no error says so.
ELSEWHERE = {
    # `no_sync` and `sync_gradients` have nothing to do where no engine is, and gradsync has put none there yet.
    **{("bare", one): "no engine" for one in ("no_sync_then_sync_gradients", "no_sync_then_backward")},
    **{
        (engine, one): "no engine"
        for engine in ("fsdp1_no_root", "fsdp2_no_root")
        for one in ("no_sync_then_sync_gradients", "no_sync_then_backward")
    },
    # Parameters kept gathered beyond an update are stale: accumulating sees to that, a boundary of one's own has to.
    ("fsdp2_gathered", "no_sync_then_backward"): "stale",
    # The gradient of a flat parameter is one tensor, with zeros where nothing came.
    **{(engine, "a_parameter_that_nobody_used"): "zeros" for engine in FSDP1},
}

CELLS = [(engine, scenario) for engine in HOMES for scenario in SCENARIOS if (engine, scenario) not in ELSEWHERE]


@pytest.mark.parametrize(("engine", "scenario"), CELLS)
def test_the_parameters_are_those_of_one_big_batch(ranks, engine, scenario):
    """After each update, on every rank, to 1e-10 in float64."""
    ranks(HOMES[engine][0]).run("tests.engines.scenarios:cell", engine, scenario, HOLES.get((engine, scenario)), limit=30)
