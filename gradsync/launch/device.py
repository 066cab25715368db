"""Chooses a rank's device, and the backend that moves its tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradsync._errors import GradSyncError


def default_backend() -> str:
    """The backend for this machine's accelerator, or gloo without one."""
    kind = _accelerator()
    if kind is None:
        return "gloo"
    if hasattr(dist, "get_default_backend_for_device"):
        return str(dist.get_default_backend_for_device(kind))
    return "nccl" if kind == "cuda" else "gloo"


def device_of(local_rank: int, backend: str | None) -> torch.device:
    """The device of the host's rank `local_rank`. `backend` moves its tensors; it is None if there is only one rank.

    The device is the CPU if there is no accelerator, or if the backend cannot move its tensors: no backend moves those
    of mps.
    """
    kind = _accelerator()
    if kind is None or (backend is not None and not _moves(backend, kind)):
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if count == 1:
        return torch.device(kind, 0)  # the only one that this process sees, whatever its number on the host
    if local_rank >= count:
        raise GradSyncError(
            f"Each rank needs a device of its own, but LOCAL_RANK is {local_rank} on a host with {count} {kind} "
            f"devices. Start at most {count} ranks on it (--nproc-per-node)."
        )
    return torch.device(kind, local_rank)


def _accelerator() -> str | None:
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def _moves(backend: str, kind: str) -> bool:
    if ":" in backend:  # "cpu:gloo,cuda:nccl" names the kinds
        return kind in {part.partition(":")[0] for part in backend.lower().split(",")}
    return kind in dist.Backend.backend_capability.get(backend.lower(), [kind])
