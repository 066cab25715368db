from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from tests.support.programs import Programs
from tests.support.ranks import Ranks

settings.register_profile("gradsync", deadline=None)  # the machine may be busy
settings.load_profile("gradsync")

_POOLS: dict[int, Ranks] = {}


def pool(size: int) -> Ranks:
    return _POOLS.setdefault(size, Ranks(size))


@pytest.fixture
def ranks():
    """`ranks(2)` gives two real ranks, started once for the whole session."""
    return pool


@pytest.fixture(scope="module")
def new_ranks():
    """`ranks`, begun anew for a file: a rank without an item cannot choose between the groups that others have left."""
    for one in _POOLS.values():
        one.stop()
    return pool


@pytest.fixture(scope="session")
def programs():
    """`programs.run("script.py", "--option")` is a program's exit code, output and complaints."""
    starter = Programs()
    yield starter
    starter.stop()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Two workers take the files in this order: what takes longest is not left to one of them at the end.
FIRST = ["faults/", "verify/", "programs/", "docs/test_examples", "resume/", "typing_/", "overlap/", "device/", "bench/"]


def pytest_collection_modifyitems(items):
    def place(item) -> int:
        name = item.nodeid.removeprefix("tests/")
        return next((place for place, first in enumerate(FIRST) if name.startswith(first)), len(FIRST))

    items.sort(key=place)  # stable


def pytest_collection_finish():
    gc.freeze()  # what was imported is there for ever, and need not be looked through by each gc.collect()


def pytest_sessionfinish():
    for one in _POOLS.values():
        one.stop()
