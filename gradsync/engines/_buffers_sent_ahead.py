"""Sends buffers to the other ranks now, and puts them in place later, whatever is sent in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence


class BuffersOnTheirWay:
    """Buffers of the rank `source` of `group`, broadcast as bytes: one collective for each device."""

    def __init__(self, buffers: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for buffer in buffers:
            by_device.setdefault(buffer.device, []).append(buffer)
        self._sent: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []
        for some in by_device.values():
            flat = torch.cat([_bytes(buffer.detach()) for buffer in some])
            work = dist.broadcast(flat, dist.get_global_rank(group, source), group=group, async_op=True)
            self._sent.append((some, flat, work))

    def arrive(self) -> None:
        """Wait for the buffers, but for nothing that was sent later. They are then the same on all ranks."""
        for buffers, flat, work in self._sent:
            work.wait()
            parts = flat.split([buffer.numel() * buffer.element_size() for buffer in buffers])
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
                for buffer, part in zip(buffers, parts, strict=True):
                    # Cloned, because the bytes may not be aligned for this dtype.
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
        self._sent.clear()


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.contiguous().view(-1).view(torch.uint8)
