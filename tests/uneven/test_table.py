"""Ranks of unequal length on every engine: the same numbers everywhere, and each hole with the error that stands there."""

from __future__ import annotations

import pytest

from gradsync.verify.table import ROWS
from tests.support.homes import HOMES
from tests.support.training import cell


@pytest.mark.parametrize("scenario", [name for name in ROWS if name.startswith("uneven")])
@pytest.mark.parametrize("engine", HOMES)
def test_the_parameters_are_those_of_one_big_batch(ranks, engine, scenario):
    """After each update, on every rank, to 1e-10 in float64."""
    ranks(HOMES[engine].ranks).run(cell, engine, scenario, limit=30)
