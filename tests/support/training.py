"""A decorated step on any engine, and what its parameters have to be, from `python -m gradsync verify`; and its cells."""

from __future__ import annotations

from gradsync.verify.table import CELLS, try_cell
from gradsync.verify.training import DECAY, LR, Run, data, items_of, reference  # noqa: F401


def cell(engine: str, row: str) -> None:
    """One cell of the table: the promise holds on the engine, or ends in the error that stands there."""
    try_cell(engine, CELLS[engine, row])
