"""The loss of a whole micro-batch, from those of its parts."""

from __future__ import annotations

from typing import Any

import torch

from gradsync._loss import LossSum, detach, find_loss


def add(whole: torch.Tensor | LossSum | None, part: torch.Tensor | LossSum, weight: float) -> torch.Tensor | LossSum:
    """`whole` with one part more, without a graph. Sums and their counts add up; a mean weighs its share of the rows.

    >>> add(add(None, torch.tensor(3.0), 0.75), torch.tensor(7.0), 0.25)
    tensor(4.)
    """
    if isinstance(part, LossSum):
        if not isinstance(whole, LossSum):
            return plain(part)
        return LossSum(whole.loss + part.loss.detach(), _add_counts(whole.count, part.count))
    weighed = part.detach() * weight
    return weighed if not isinstance(whole, torch.Tensor) else whole + weighed


def plain(loss: torch.Tensor | LossSum) -> torch.Tensor | LossSum:
    """The same values, with no graph and no memory of others."""
    if isinstance(loss, LossSum):
        return LossSum(loss.loss.detach().clone(), loss.count)
    return loss.detach().clone()


def put(returned: Any, part: torch.Tensor | LossSum, whole: torch.Tensor | LossSum) -> Any:
    """`returned` by a part, with the loss of the `whole` in the place of its own."""
    if returned is part:
        return whole
    returned = detach(returned, part)
    now = find_loss(returned)
    _tensor(now).data = _tensor(whole).clone()
    if isinstance(now, LossSum) and isinstance(whole, LossSum):
        object.__setattr__(now, "count", whole.count)  # frozen for its users
    return returned


def without_graph(returned: Any, loss: torch.Tensor | LossSum) -> tuple[Any, torch.Tensor | LossSum]:
    """`returned`, its loss detached, and that loss."""
    returned = detach(returned, loss)
    return returned, plain(loss) if _tensor(loss).requires_grad else loss


def _tensor(loss: torch.Tensor | LossSum) -> torch.Tensor:
    return loss.loss if isinstance(loss, LossSum) else loss


def _add_counts(some: float | torch.Tensor, others: float | torch.Tensor) -> float | torch.Tensor:
    """Exactly: whole numbers in 64 bits, others in float64."""
    some, others = _wide(some), _wide(others)
    if isinstance(some, float) and isinstance(others, torch.Tensor):
        others = others.double()
    if isinstance(others, float) and isinstance(some, torch.Tensor):
        some = some.double()
    return some + others


def _wide(count: float | torch.Tensor) -> float | torch.Tensor:
    if not isinstance(count, torch.Tensor):
        return count
    return count.double() if count.is_floating_point() else count.long()
