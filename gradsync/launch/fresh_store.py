"""A store without the keys of earlier attempts, for ranks that torchrun has restarted.

torchrun keeps one TCPStore through all restarts of a job and gives its ranks no prefix in it (torch 2.13; see
pytorch#135712). A restarted rank then finds the addresses that gloo wrote there in the attempt before, and connects to
processes that are dead: measured with two ranks, 3 of 4 restarts failed that way. TORCHELASTIC_RESTART_COUNT is no
prefix, because each host counts its own failures. So the ranks agree on a name that was never used.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

_PAUSE = 0.02  # seconds between two looks


def is_shared() -> bool:
    """Whether the store that the environment names is torchrun's own."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def fresh_store(timeout: timedelta = default_pg_timeout) -> tuple[Any, int, int]:
    """A store for the ranks of this attempt, this process's rank, and the number of ranks. Collective."""
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    attempts = dist.PrefixStore("gradsync/attempts", store)  # type: ignore[attr-defined]
    name = _agree(attempts, rank, world_size, timeout)
    attempt = dist.PrefixStore(f"gradsync/attempt/{name}", store)  # type: ignore[attr-defined]
    return attempt, rank, world_size


def _agree(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """Rank 0 proposes a name, each rank answers, and rank 0 confirms the answers. A rank waits for its own among them.

    What dead ranks have left in the store does no harm: their proposal was confirmed for their answers, if at all.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        answers = [f"{mine}/{other}" for other in range(1, world_size)]
        store.set("proposal", mine)
        if answers:
            store.wait(answers, timeout)
        store.set(f"{mine}/confirmed", json.dumps([store.get(answer).decode() for answer in answers]))
        return mine
    proposal, limit = "", time.monotonic() + timeout.total_seconds()
    while time.monotonic() < limit:
        newest: str = store.get("proposal").decode()
        if proposal != newest:
            proposal = newest
            store.set(f"{proposal}/{rank}", mine)
        confirmed = f"{proposal}/confirmed"
        if store.check([confirmed]) and json.loads(store.get(confirmed))[rank - 1] == mine:
            return proposal
        time.sleep(_PAUSE)
    raise TimeoutError(f"Every rank must begin within {timeout}, but rank 0 has not heard of rank {rank} in that time.")
