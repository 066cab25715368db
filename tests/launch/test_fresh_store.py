"""The store that ranks share after torchrun has restarted them."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch.distributed as dist

from gradsync.launch import fresh_store


def test_ranks_that_restart_meet_in_a_fresh_store():
    """What dead ranks left in a shared store, an unanswered proposal or a confirmed one, does no harm."""
    store = dist.HashStore()
    names = []
    for attempt in range(3):
        results: dict[int, str] = {}

        def begin(rank: int, results: dict[int, str] = results) -> None:
            results[rank] = fresh_store._agree(store, rank, 3, timedelta(seconds=10))

        if attempt == 2:
            store.set("proposal", "of a rank that died before it was answered")
        threads = [threading.Thread(target=begin, args=(rank,)) for rank in (2, 1, 0)]
        for thread in threads:
            thread.start()
            thread.join(0.1)  # the others see the old proposal first
        for thread in threads:
            thread.join(10)
        assert len(results) == 3 and len(set(results.values())) == 1
        names.append(results[0])
    assert len(set(names)) == 3
