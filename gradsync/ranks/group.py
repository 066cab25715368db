"""Whether the ranks of a job can meet at all."""

from __future__ import annotations

import os

import torch.distributed as dist

from gradsync._errors import GradSyncError


def require_group(caller: str) -> None:
    """Raise where torchrun has started several ranks and no process group joins them.

    Each rank would train alone, and nothing would tell. `caller` is the function as its user knows it.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal() or int(size) <= 1 or (dist.is_available() and dist.is_initialized()):
        return
    raise GradSyncError(
        f"{caller} needs the process group of this job's {size} ranks (WORLD_SIZE), but none is initialised. "
        "Call it inside `with gradsync.process_group() as world:`, or after torch.distributed.init_process_group()."
    )
