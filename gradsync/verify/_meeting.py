"""Where the ranks of several processes of torchrun's meet: its own store, or one that rank 0 holds in its place."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gradsync.verify._child import Place

_LEAVING = 60.0  # seconds for the slowest rank to come to its end


@dataclass
class Meeting:
    """This process among those that torchrun, or a launcher with its variables, has started."""

    place: Place
    size: int
    address: str
    attempt: str
    """torchrun keeps its store as it restarts the processes: their keys must not be those of the ones before."""
    _store: Any

    @classmethod
    def of_torchrun(cls) -> Meeting | None:
        """None where this process has been started alone."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return None
        import torch.distributed as dist

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=holds, wait_for_workers=False, timeout=timedelta(seconds=300), multi_tenant=True
        )
        attempt = f"gradsync verify/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return cls(Place(rank, int(os.environ.get("LOCAL_RANK", "0"))), size, f"{host}:{port}", attempt, store)

    def leave(self) -> None:
        """Stay until all are done, for the store may be this process's own."""
        number = self._store.add(f"{self.attempt}/left", 1)
        end = time.monotonic() + _LEAVING
        while self.place.rank == 0 and number < self.size and time.monotonic() < end:
            time.sleep(0.1)
            number = self._store.add(f"{self.attempt}/left", 0)
