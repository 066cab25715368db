"""The process group: whether there is one, the error if it is missing, and its ranks."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from gradsync._errors import GradSyncError


def several_ranks() -> bool:
    """Whether a process group of more than one rank is initialised."""
    return dist.is_initialized() and dist.get_world_size() > 1


def require_group(caller: str) -> None:
    """Raise if torchrun has started several processes, and this process has no process group."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1 and not dist.is_initialized():
        raise GradSyncError(
            f"{caller} needs the process group of this job, for WORLD_SIZE is {size}, but none is initialised: each "
            "rank would train a model of its own. Put the program inside `with gradsync.process_group():`, or call "
            "torch.distributed.init_process_group first."
        )


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a group still exists."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """The global ranks of a group; [0] without a group."""
    return [0] if group is None else dist.get_process_group_ranks(group)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that a rank waits for the others in a collective."""
    # No public getter in torch 2.13; a backend of somebody else's may have no options.
    backend = group._get_backend(group._device_types[0])
    timeout = getattr(getattr(backend, "options", None), "_timeout", None) or default_pg_timeout
    return float(timeout.total_seconds())
