from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.ranks import Ranks

_POOLS: dict[int, Ranks] = {}


def pool(size: int) -> Ranks:
    return _POOLS.setdefault(size, Ranks(size))


@pytest.fixture
def ranks():
    """`ranks(2)` gives two real ranks, started once for the whole session."""
    return pool


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_sessionfinish():
    for one in _POOLS.values():
        one.stop()
