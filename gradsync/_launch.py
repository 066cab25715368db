"""Entering and leaving a job of several ranks: `process_group`, and `ddp`."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradsync._fresh_store import fresh_store, is_shared
from gradsync.engines import settle_all_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@dataclass(frozen=True)
class World:
    """This process's place among the ranks."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


@contextmanager
def process_group(backend: str | None = None) -> Iterator[World]:
    """The process group of a job under torchrun, ended cleanly; nothing to do under a plain `python`.

    The backend is nccl where there are GPUs, else gloo. Where a process group is initialised already, it is left alone.

    >>> with gradsync.process_group() as world:
    ...     print(world.rank, world.world_size, world.device)
    0 1 cpu
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    mine = "RANK" in os.environ and dist.is_available() and not dist.is_initialized()
    if mine:
        if cuda:
            torch.cuda.set_device(device)
        backend = backend or ("nccl" if cuda else "gloo")
        if is_shared():
            store, rank, world_size = fresh_store()
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        else:
            dist.init_process_group(backend)
    try:
        if dist.is_available() and dist.is_initialized():
            yield World(dist.get_rank(), dist.get_world_size(), local_rank, device)
        else:
            yield World(0, 1, local_rank, device)
    finally:
        if mine and dist.is_initialized():
            settle_all_groups()
            dist.destroy_process_group()


def ddp(model: nn.Module, **kwargs: Any) -> nn.Module:
    """The model on `DistributedDataParallel` if there are several ranks and something to train, else the model itself.

    The keywords are those of `DistributedDataParallel`. A model that is on it already comes back as it is.

    >>> model = torch.nn.Linear(1, 1)
    >>> gradsync.ddp(model) is model  # one process
    True
    """
    bare = getattr(model, "_orig_mod", model)
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size(kwargs.get("process_group")) > 1
    if isinstance(bare, DistributedDataParallel) or not several or not any(p.requires_grad for p in model.parameters()):
        return model
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and next(iter(devices)).type == "cuda":
        kwargs.setdefault("device_ids", [next(iter(devices)).index])
    return DistributedDataParallel(model, **kwargs)
