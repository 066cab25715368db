"""The loss of a whole micro-batch, from the losses of its parts."""

from __future__ import annotations

from typing import Any

import torch

from gradsync._loss import LossSum, detach, find_loss, tensor_of, widest


def add(whole: torch.Tensor | LossSum | None, part: torch.Tensor | LossSum, weight: float) -> torch.Tensor | LossSum:
    """`whole` with one more part, without a graph. Sums and counts add up; a mean is weighted by its share of the rows.

    >>> add(add(None, torch.tensor(3.0), 0.75), torch.tensor(7.0), 0.25)
    tensor(4.)
    """
    if isinstance(part, LossSum):
        if not isinstance(whole, LossSum):
            return LossSum(part.loss.detach().clone(), part.count)
        return LossSum(whole.loss + part.loss.detach(), _add_counts(whole.count, part.count))
    weighed = part.detach() * weight
    return weighed if not isinstance(whole, torch.Tensor) else whole + weighed


def put(returned: Any, part: torch.Tensor | LossSum, whole: torch.Tensor | LossSum) -> Any:
    """What a part `returned`, detached, with the loss of the `whole` in place of the part's."""
    returned = detach(returned, part)
    now = find_loss(returned)
    tensor_of(now).data = tensor_of(whole)
    if isinstance(now, LossSum) and isinstance(whole, LossSum):
        object.__setattr__(now, "count", whole.count)  # frozen for its users
    return returned


def _add_counts(some: float | torch.Tensor, others: float | torch.Tensor) -> float | torch.Tensor:
    """Add as exactly as possible: whole numbers in 64 bits, others in float64 (float32 on mps)."""
    some, others = _wide(some), _wide(others)
    if isinstance(some, float) and isinstance(others, torch.Tensor):
        others = others.to(widest(others))
    if isinstance(others, float) and isinstance(some, torch.Tensor):
        some = some.to(widest(some))
    return some + others


def _wide(count: float | torch.Tensor) -> float | torch.Tensor:
    if not isinstance(count, torch.Tensor):
        return count
    return count.to(widest(count)) if count.is_floating_point() else count.long()
