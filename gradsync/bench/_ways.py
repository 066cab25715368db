"""The columns: each way to accumulate, written as its users write it, and what it needs to run."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import NamedTuple

import gradsync
from gradsync.bench import _loops, _own_loops
from gradsync.bench._remedies import REMEDIES
from gradsync.bench._task import Task, Window


class Way(NamedTuple):
    """A column."""

    title: str
    build: Callable[[Task], Window]
    package: str | None = None
    """What must be installed for it."""


WAYS: Mapping[str, Way] = {
    "baseline": Way("baseline", _loops.baseline),
    "improperly": Way("no_sync improperly", _loops.improperly),
    "no_sync": Way("no_sync", _loops.no_sync),
    "accumulating": Way("accumulating", _own_loops.accumulating),
    "accumulating_ddp": Way("accumulating on DDP", _own_loops.accumulating_ddp),
    "sync_every": Way("sync_every", _own_loops.sync_every),
    "accelerate": Way("Accelerate", _loops.accelerate, "accelerate"),
    "fabric": Way("Fabric", _loops.fabric, "lightning_fabric"),
    "overlap": Way("overlap", _own_loops.overlap),
    "bf16": Way("bf16", _own_loops.bf16),
    "both": Way("overlap and bf16", _own_loops.both),
    "compute": Way("compute alone", _loops.compute),
}

ALWAYS = ("no_sync", "compute")
"""Ratios, the limit and the advice are computed from these."""


def obstacle(name: str) -> str | None:
    """Tell what this machine or this gradsync lacks for the way, as the end of a sentence; None if nothing."""
    package = WAYS[name].package
    if package is not None and importlib.util.find_spec(package) is None:
        return f"not installed (`pip install {package.replace('_', '-')}`)"
    lacking = REMEDIES[name].lacking(gradsync.accumulating) if name in REMEDIES else []
    if lacking:
        named = " and no ".join(f"`{keyword}`" for keyword in lacking)
        return f"`gradsync.accumulating` has no {named} in this version"
    return None
