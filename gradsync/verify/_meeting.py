"""The store where the ranks of several processes of torchrun's meet: torchrun's own, or one that rank 0 holds."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gradsync.verify._child import Place

_LEAVING = 60.0  # seconds for the slowest rank to finish


@dataclass
class Meeting:
    """This process among those that torchrun, or a launcher with its variables, has started."""

    place: Place
    size: int
    address: str
    attempt: str
    """The prefix of the keys. It differs after a restart, because torchrun keeps its store."""
    _store: Any

    @classmethod
    def of_torchrun(cls) -> Meeting | None:
        """The meeting of this process; None if it was started alone."""
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
        """Wait until all have left, if this is rank 0, because it may hold the store."""
        number = self._store.add(f"{self.attempt}/left", 1)
        end = time.monotonic() + _LEAVING
        while self.place.rank == 0 and number < self.size and time.monotonic() < end:
            time.sleep(0.1)
            number = self._store.add(f"{self.attempt}/left", 0)
