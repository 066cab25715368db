"""Flags that the host knows, on the device where ranks add them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def flags_on(device: torch.device, flags: Sequence[bool], dtype: torch.dtype) -> torch.Tensor:
    """The flags as numbers. The host does not wait: a copy from memory that is not pinned waits for the whole queue."""
    row = torch.tensor(flags, dtype=dtype)
    return row if device.type == "cpu" else row.pin_memory().to(device, non_blocking=True)
