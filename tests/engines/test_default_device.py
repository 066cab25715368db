"""A program that has set a default device: what gradsync makes for itself lies where it has to."""

from __future__ import annotations

import pytest
import torch

from tests.support.homes import HOMES
from tests.support.training import cell

ENGINES = ("bare", "ddp_find_unused", "ddp_static", "fsdp1_full_orig", "fsdp2", "hsdp_window")
ROWS = ("clipping", "iterator", "overlap", "compress")
UNEVEN = ("uneven_loss_sum", "uneven_over_of_unknown_length", "uneven_amp", "uneven_skip")


def with_a_default_device(engine: str, row: str) -> None:
    """On "meta", whose tensors have no values: one that is made there by mistake cannot be read."""
    with torch.device("meta"):
        cell(engine, row)


@pytest.mark.parametrize("row", [*ROWS, *UNEVEN])
@pytest.mark.parametrize("engine", ENGINES)
def test_promises_hold_whatever_the_default_device_is(ranks, engine: str, row: str) -> None:
    ranks(HOMES[engine].ranks).run(with_a_default_device, engine, row, limit=30)
