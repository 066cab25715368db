"""Memory that serves window after window: on a CPU, new pages cost more than what is copied into them.

Private in torch (read in torch 2.13; tests/overlap/test_travel.py fails when it changes):
`torch._C._storage_Use_Count`. What has travelled becomes the gradients of a landing, and who keeps one of those, or a
view of it, keeps it for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_NOBODY = 2  # holders of a storage that only its tensor holds, and the question itself


class Memory:
    """Flat tensors that are not needed any more, unless somebody holds a view of one."""

    def __init__(self) -> None:
        self._spare: list[torch.Tensor] = []

    def take(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of as many elements, with anything in it."""
        for place, one in enumerate(self._spare):
            if one.dtype == dtype and one.numel() == like.numel() and one.device == like.device and _is_free(one):
                return self._spare.pop(place)
        return torch.empty(like.numel(), dtype=dtype, device=like.device)

    def give(self, tensors: Iterable[torch.Tensor]) -> None:
        """These may be taken."""
        self._spare += [tensor for tensor in tensors if not tensor.is_sparse]

    def clear(self) -> None:
        """Let go of what was not taken."""
        self._spare.clear()


def _is_free(tensor: torch.Tensor) -> bool:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count == _NOBODY
