"""Counting what really goes over the wire, from torch's flight recorder; what runs on the ranks for test_engines.py."""

from __future__ import annotations

import json
from collections import Counter

import torch

from tests.engines.scenarios import Run
from tests.support.homes import home_of


def recorded() -> list[dict]:
    return json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", [])


class Wire:
    """Collectives since the last look, as (operation, group). gloo does a reduce-scatter by an all-reduce."""

    def __init__(self) -> None:
        self._seen = max((entry["record_id"] for entry in recorded()), default=-1)

    def look(self) -> dict[str, int]:
        fresh = [entry for entry in recorded() if entry["record_id"] > self._seen]
        self._seen = max([self._seen, *(entry["record_id"] for entry in fresh)])
        names = (
            f"{entry['profiling_name'].removeprefix('gloo:')} {entry['process_group'][1].removeprefix('mesh_')}"
            for entry in fresh
        )
        return dict(Counter(names))


def window(engine: str, mode: str = "calls") -> list[dict[str, int]]:
    """What each call of the third window sends, and what a flush in the fourth does."""
    home = home_of(engine)
    run = Run(home)
    for index in range(6):
        run.step(home.model, run.optimizer, index)
    wire, sent = Wire(), []
    for index in range(3):
        run.step(home.model, run.optimizer, index)
        sent.append(wire.look())
    for index in range(2):
        run.step(home.model, run.optimizer, index)
    wire.look()
    run.step.flush()
    return [*sent, wire.look()]
