"""Counting what really goes over the wire."""

from __future__ import annotations

import json
from collections import Counter

import torch
import torch.distributed as dist


def num_collectives(group=None) -> int:
    """How many collectives a group has begun so far."""
    return (group or dist.group.WORLD)._get_sequence_number_for_group()


def _recorded() -> list[dict]:
    return json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", [])


class Wire:
    """Collectives since the last look, as (operation, group), from torch's flight recorder.

    gloo does a reduce-scatter by an all-reduce.
    """

    def __init__(self) -> None:
        self._seen = max((entry["record_id"] for entry in _recorded()), default=-1)

    def look(self) -> dict[str, int]:
        fresh = [entry for entry in _recorded() if entry["record_id"] > self._seen]
        self._seen = max([self._seen, *(entry["record_id"] for entry in fresh)])
        names = (
            f"{entry['profiling_name'].removeprefix('gloo:')} {entry['process_group'][1].removeprefix('mesh_')}"
            for entry in fresh
        )
        return dict(Counter(names))
