"""What is done to gradients: normalise, clip, check, discard. Parameters in, nothing kept."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn


def normalise(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply the gradients by `factor`, in place; 1.0 costs nothing.

    >>> weight = torch.nn.Parameter(torch.zeros(2)); weight.grad = torch.ones(2)
    >>> normalise([weight], 0.5); weight.grad
    tensor([0.5000, 0.5000])
    """
    if factor == 1.0:
        return
    for gradients in _alike(parameters):
        if gradients[0].is_sparse:
            for gradient in gradients:
                gradient.mul_(factor)
        else:
            torch._foreach_mul_(gradients, factor)


def norm(parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients as one vector, wherever their parts live."""
    parts = [_full(get_total_norm([_values(g) for g in gradients], norm_type)) for gradients in _alike(parameters)]
    if not parts:
        return torch.zeros(())
    if len(parts) == 1:
        return parts[0]
    return torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]), norm_type)


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients down to a norm of at most `max_norm`; returns the norm that they had.

    >>> weight = torch.nn.Parameter(torch.zeros(2)); weight.grad = torch.tensor([3.0, 4.0])
    >>> clip([weight], 1.0), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    parameters = list(parameters)
    total = norm(parameters)
    sparse = [p for p in parameters if p.grad is not None and p.grad.is_sparse]
    clip_grads_with_norm_([p for p in parameters if p.grad is not None and not p.grad.is_sparse], max_norm, total)
    if sparse:
        normalise(sparse, min(1.0, max_norm / (float(total) + 1e-6)))
    return total


def all_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether no gradient has an inf or a NaN. One host synchronisation."""
    return bool(torch.isfinite(norm(parameters, float("inf"))))  # the largest of all: it cannot overflow by itself


def discard(parameters: Iterable[nn.Parameter]) -> None:
    """Drop the gradients, as `zero_grad(set_to_none=True)` does."""
    for parameter in parameters:
        parameter.grad = None


def _alike(parameters: Iterable[nn.Parameter]) -> Sequence[list[torch.Tensor]]:
    """The gradients in groups that one foreach call takes: torch refuses to mix meshes, and layouts."""
    groups: defaultdict[object, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            groups[getattr(gradient, "device_mesh", None), gradient.is_sparse].append(gradient)
    return list(groups.values())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _full(total: torch.Tensor) -> torch.Tensor:
    """The norm of sharded gradients is itself spread over the ranks."""
    full = getattr(total, "full_tensor", None)
    return total if full is None else full()
