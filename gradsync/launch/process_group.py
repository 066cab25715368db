"""`process_group`: initialises the process group of a job under torchrun, and ends it cleanly."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, fields
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync._errors import GradSyncError
from gradsync.launch.device import default_backend, device_of
from gradsync.launch.fresh_store import fresh_store, is_shared
from gradsync.launch.leaving import leave

_USE = "Use it as `with gradsync.process_group() as world:`, around everything that the ranks do together."


@dataclass(frozen=True)
class World:
    """This process's place among the ranks."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


def process_group(backend: str | None = None, timeout: timedelta | float | None = None) -> GroupContext:
    """The process group of a job under torchrun, ended cleanly; nothing to do under a plain `python`.

    The backend is that of this rank's accelerator (nccl for cuda), or gloo without one. `timeout`, in seconds or a
    timedelta, limits each wait of a rank for the others; without it, torch's own limits hold. Where a process group is
    initialised already, it is left alone.

    An exception that leaves the `with` block goes on. With nccl and its like, its traceback is printed first and the
    group aborted, so that neither this rank nor the others wait for each other.

    >>> with gradsync.process_group() as world:
    ...     print(world.rank, world.world_size, world.device)
    0 1 cpu
    """
    if backend is not None and not isinstance(backend, str):
        raise TypeError(
            f'process_group takes the name of a backend, such as "gloo", but got {backend!r}, '
            f"of type {type(backend).__name__}. Leave it out for the default of this machine's devices."
        )
    return GroupContext(backend, _duration(timeout))


class GroupContext:
    """What `process_group` returns: a context manager that gives the `World`."""

    def __init__(self, backend: str | None, timeout: timedelta | None) -> None:
        self._backend = backend
        self._timeout = timeout
        self._entered = False
        self._begun = False  # whether this has initialised a group, and so must end it

    def __enter__(self) -> World:
        if self._begun:
            raise GradSyncError(f"This gradsync.process_group() has been entered already. {_USE}")
        self._entered = True
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if "RANK" in os.environ and dist.is_available() and not dist.is_initialized():
            several = int(os.environ.get("WORLD_SIZE", "1")) > 1
            backend = self._backend or default_backend()
            device = device_of(local_rank, backend if several else None)
            if device.index is not None:
                torch.accelerator.set_device_index(device.index)
            _initialise(backend, self._timeout)
            self._begun = True
        elif dist.is_available() and dist.is_initialized():
            device = device_of(local_rank, dist.get_backend() if dist.get_world_size() > 1 else None)
        else:
            return World(0, 1, local_rank, device_of(local_rank, None))
        return World(dist.get_rank(), dist.get_world_size(), local_rank, device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun and dist.is_initialized():
            leave(error)
        self._begun = False

    def __del__(self) -> None:
        if not self._entered:
            warnings.warn(
                f"gradsync.process_group() was called and not entered, so that no process group was made. {_USE}",
                RuntimeWarning,
                stacklevel=2,
            )

    if not TYPE_CHECKING:  # a type checker should go on to reject every attribute

        def __getattr__(self, name: str) -> Any:
            if name in {field.name for field in fields(World)}:
                self._entered = True  # this error says so: `__del__` must not warn as well
                raise GradSyncError(f"gradsync.process_group() has no {name} before it is entered. {_USE}")
            raise AttributeError(f"gradsync.process_group() has no attribute {name!r}. {_USE}")


def _initialise(backend: str, timeout: timedelta | None) -> None:
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if is_shared():
        store, rank, world_size = fresh_store(**limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **limit)
    else:
        dist.init_process_group(backend, **limit)


def _duration(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, timedelta | int | float):
        raise TypeError(
            "process_group(timeout=) takes a number of seconds or a datetime.timedelta, "
            f"but got {timeout!r}, of type {type(timeout).__name__}."
        )
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(
            f"process_group(timeout=) takes a positive, finite time, but got {timeout!r}. "
            "Leave it out for torch's own limits."
        )
    return timedelta(seconds=seconds)
