"""Promises x engines: the same numbers everywhere, and each hole with the error that stands there.

They are those of `python -m gradsync verify`. The same of ranks of unequal length is in tests/uneven/test_table.py.
"""

from __future__ import annotations

import pytest

from gradsync.verify.table import CELLS, ROWS
from tests.support.homes import HOMES
from tests.support.training import cell

EVEN = [name for name in ROWS if not name.startswith("uneven")]
TRIED = [(engine, one) for engine in HOMES for one in EVEN if CELLS[engine, one].why_not is None]
ALSO = ("overlap", "compress", "fit")  # where these cannot be had, tests/overlap and tests/parts have the errors


@pytest.mark.parametrize(
    ("engine", "scenario"), [cell for cell in TRIED if cell[1] not in ALSO or CELLS[cell].error is None]
)
def test_the_parameters_are_those_of_one_big_batch(ranks, engine, scenario):
    """After each update, on every rank, to 1e-10 in float64."""
    ranks(HOMES[engine].ranks).run(cell, engine, scenario, limit=30)
