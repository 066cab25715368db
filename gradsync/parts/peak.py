"""How much memory something takes at its most, beside how much there is."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_MARGIN = 0.9  # of what is free: allocators cut it into blocks, and lose some of it between these


class Took(NamedTuple):
    """What one attempt took at its most, and what could be had, in bytes."""

    peak: float
    free: float


class Meter(Protocol):
    """Measures an attempt."""

    def __call__(self, attempt: Callable[[], object]) -> Took | None:
        """Make it; None where this machine does not tell."""
        ...


def meter_of(device: torch.device) -> Meter:
    """What measures on this device."""
    return _on_cpu if device.type == "cpu" else lambda attempt: _on_accelerator(attempt, device)


def is_room(before: Took | None, now: Took, times: float) -> bool:
    """Whether `times` as many rows are expected to fit, on a line through `now` and `before` it, with half as many.

    One size alone does not tell what of it is for the rows, and what for gathered parameters and their gradients.

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
    """Give the system what the allocator keeps of memory that was freed: an attempt in that would seem to take none."""
    with suppress(AttributeError, OSError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _kib(path: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{path} does not tell {name}")
    return int(found[1])
