"""Copies flags from the host to the device where ranks add them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def flags_on(device: torch.device, flags: Sequence[bool], dtype: torch.dtype) -> torch.Tensor:
    """The flags as numbers, copied from pinned memory: any other copy makes the host wait for the device's queue."""
    row = torch.tensor(flags, dtype=dtype, device="cpu")
    return row if device.type == "cpu" else row.pin_memory().to(device, non_blocking=True)
