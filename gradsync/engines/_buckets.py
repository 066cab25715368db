"""How gradients lie in a bucket of DDP's reducer: in the layouts of their parameters, which the bucket does not tell.

`GradBucket.gradients()` shows them row by row, whatever their layout; those of a model in `channels_last` are not.
Complex ones are pairs of real numbers in the bucket's buffer, and are counted there as if each were one number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


def gradients_in(bucket: torch.distributed.GradBucket) -> Sequence[tuple[nn.Parameter, torch.Tensor]]:  # type: ignore[name-defined]
    """The parameters of a bucket, each with the view of its gradient."""
    buffer, parameters = bucket.buffer(), cast("list[nn.Parameter]", bucket.parameters())
    both = zip(parameters, bucket.gradients(), strict=True)
    return [(parameter, _laid_out(_in_kind(view, buffer, parameter), parameter)) for parameter, view in both]


def in_pairs(buffer: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A bucket's buffer with numbers of the parameter's kind."""
    if parameter.is_complex() and not buffer.is_complex():
        return torch.view_as_complex(buffer.view(-1, 2))
    return buffer


def _in_kind(view: torch.Tensor, buffer: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    numbers = in_pairs(buffer, parameter)
    if numbers is buffer:
        return view
    offset = int(view.storage_offset()) - int(buffer.storage_offset())
    return numbers[offset : offset + view.numel()].view(view.shape)


def _laid_out(view: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The view in the parameter's layout, if that is dense; the reducer lays out the others row by row."""
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return view
    return view.as_strided(parameter.shape, parameter.stride(), view.storage_offset())
