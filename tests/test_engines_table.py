"""Scenarios x engines: the same numbers everywhere, and each hole with the error that stands there."""

from __future__ import annotations

import pytest

from tests.engine_cases import SCENARIOS
from tests.engine_homes import HOMES

FSDP1 = [name for name in HOMES if name.startswith("fsdp1")]

# Where a scenario cannot be had on an engine: what the error says instead.
HOLES = {
    **{(engine, "tail_flush"): r"Iterate with \.over" for engine in FSDP1},
    **{(engine, "no_sync_then_sync_gradients"): r"Iterate with \.over" for engine in FSDP1},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("engine", HOMES)
def test_the_parameters_are_those_of_one_big_batch(ranks, engine, scenario):
    """After each update, on every rank, to 1e-10 in float64."""
    ranks(HOMES[engine][0]).run("tests.engine_cases:cell", engine, scenario, HOLES.get((engine, scenario)), limit=30)
