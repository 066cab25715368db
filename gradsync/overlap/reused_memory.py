"""Memory that is used again in window after window: on a CPU, new pages cost more than the copy into them.

What has travelled becomes the gradients of a landing. If somebody keeps such a gradient, or a view of it, its memory is
not used again.

Private in torch (read in torch 2.13; tests/overlap/test_travel.py fails when it changes):
`torch._C._storage_Use_Count`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_NOBODY = 2  # the use count of a storage that only its tensor holds: that tensor, and the call that asks


class Memory:
    """Flat tensors that can be used again once nobody holds a view of them."""

    def __init__(self) -> None:
        self._spare: list[torch.Tensor] = []

    def take(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor with as many elements as `like`; its values are undefined."""
        for place, one in enumerate(self._spare):
            if one.dtype == dtype and one.numel() == like.numel() and one.device == like.device and _is_free(one):
                return self._spare.pop(place)
        return torch.empty(like.numel(), dtype=dtype, device=like.device)

    def give(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add tensors that may be taken."""
        self._spare += [tensor for tensor in tensors if not tensor.is_sparse]

    def clear(self) -> None:
        """Drop what was not taken."""
        self._spare.clear()


def _is_free(tensor: torch.Tensor) -> bool:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count == _NOBODY
