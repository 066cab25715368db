"""Chooses the engine for a `DistributedDataParallel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsync.engines._ddp import DDPEngine
from gradsync.engines._ddp_alone import AloneEngine
from gradsync.engines._ddp_searched import SearchedEngine
from gradsync.engines._ddp_static import StaticEngine

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def ddp_engine(ddp: DistributedDataParallel) -> DDPEngine:
    """The engine of one `DistributedDataParallel`."""
    if AloneEngine.fits(ddp):
        return AloneEngine(ddp)
    if SearchedEngine.fits(ddp):
        return SearchedEngine(ddp)
    return (StaticEngine if ddp.static_graph else DDPEngine)(ddp)
