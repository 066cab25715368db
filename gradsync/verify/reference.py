"""The independent answer: one process, float64, all the data at once, plain autograd, SGD written out.

Nothing of gradsync is in here, nor of torch's optimizers.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    Item = tuple[int, int]
    """A micro-batch: (rank, index)."""
    State = dict[str, torch.Tensor]


def rows_of(seed: int, rows: int, width: int = 3, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Data that depends on the arguments only."""
    return torch.randn(rows, width, generator=torch.Generator("cpu").manual_seed(seed), dtype=dtype, device="cpu")


def micro_batch(
    rank: int, index: int, rows: int = 4, dtype: torch.dtype = torch.float64, width: int = 3
) -> torch.Tensor:
    """The data of one micro-batch."""
    return rows_of(1000 * rank + index, rows, width, dtype)


def mean_of(output: torch.Tensor) -> torch.Tensor:
    """A loss that no symmetry makes small."""
    return output.square().mean() + output.sum() * 0.1


def cut(lengths: Sequence[int], steps: int | Callable[[int], int]) -> list[list[Item]]:
    """The micro-batches of each window; every rank counts its own."""
    windows: list[list[Item]] = []
    start = 0
    for window in range(10**6):
        size = steps(window) if callable(steps) else steps
        here = [(r, i) for r, n in enumerate(lengths) for i in range(start, min(start + size, n))]
        if not here:
            return windows
        windows.append(here)
        start += size
    raise AssertionError


def states(
    model: nn.Module,
    windows: Iterable[Any],
    loss_of_window: Callable[[nn.Module, Any], torch.Tensor | None],
    *,
    lr: float = 0.1,
    decay: float = 0.0,
    clip: float | None = None,
) -> list[State | torch.Tensor]:
    """The parameters by name after each update; with `clip`, each comes after the norm before clipping."""
    model = copy.deepcopy(model)
    found: list[State | torch.Tensor] = []
    for _, norm in updates(model, windows, loss_of_window, lr=lr, decay=decay, clip=clip):
        found += [] if clip is None else [norm]
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def updates(
    model: nn.Module,
    windows: Iterable[Any],
    loss_of_window: Callable[[nn.Module, Any], torch.Tensor | None],
    *,
    lr: float,
    decay: float = 0.0,
    clip: float | None = None,
) -> Iterator[tuple[list[torch.Tensor | None], torch.Tensor]]:
    """The gradients of each update and their norm; the model is trained. A loss of None makes no update."""
    parameters = list(model.parameters())
    for window in windows:
        loss = loss_of_window(model, window)
        if loss is None:
            continue
        trained = [p for p in parameters if p.requires_grad]
        found = dict(zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True))
        grads = [None if (g := found.get(p)) is None else g.to_dense() for p in parameters]
        norm = torch.cat([g.flatten() for g in grads if g is not None]).norm()
        if clip is not None:
            grads = [None if g is None else g * min(1.0, clip / (norm.item() + 1e-6)) for g in grads]
        with torch.no_grad():
            for p, g in zip(parameters, grads, strict=True):
                if g is not None:
                    p.sub_(lr * (g + decay * p))
        yield grads, norm
