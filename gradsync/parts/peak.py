"""Measures the peak memory of an attempt, and how much memory is free."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

_MARGIN = 0.9  # of what is free: allocators cut it into blocks, and lose some between them


class Took(NamedTuple):
    """The peak memory of one attempt, and what was free before it, in bytes."""

    peak: float
    free: float


Meter: TypeAlias = Callable[[Callable[[], object]], Took | None]
"""Makes an attempt; None if this machine does not tell what it took."""


def meter_of(device: torch.device) -> Meter:
    """The meter for this device."""
    return _on_cpu if device.type == "cpu" else lambda attempt: _on_accelerator(attempt, device)


def is_room(before: Took | None, now: Took, times: float) -> bool:
    """Whether `times` as many rows are expected to fit, on a line through `now` and `before`, which had half as many.

    One attempt alone does not tell how much memory is for rows, and how much for gathered parameters and gradients.

    >>> is_room(Took(60, 200), Took(100, 200), 2), is_room(Took(50, 200), Took(100, 200), 2)
    (True, False)
    """
    if before is None:
        return True
    return now.peak + 2 * (times - 1) * max(0.0, now.peak - before.peak) <= _MARGIN * now.free


def _on_accelerator(attempt: Callable[[], object], device: torch.device) -> Took:
    memory = torch.get_device_module(device)
    memory.synchronize(device)
    memory.empty_cache()
    memory.reset_peak_memory_stats(device)
    before = memory.memory_allocated(device)
    free = memory.mem_get_info(device)[0] + memory.memory_reserved(device) - before
    attempt()
    memory.synchronize(device)
    return Took(memory.max_memory_allocated(device) - before, free)


def _on_cpu(attempt: Callable[[], object]) -> Took | None:
    _trim()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before, free = _kib("/proc/self/status", "VmRSS"), _kib("/proc/meminfo", "MemAvailable")
    except OSError:  # not on Linux
        attempt()
        return None
    attempt()
    return Took(1024 * (_kib("/proc/self/status", "VmHWM") - before), 1024 * free)


def _trim() -> None:
    """Return freed memory to the system: an attempt that used what the allocator keeps would seem to take none."""
    with suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _kib(path: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{path} does not tell {name}")
    return int(found[1])
