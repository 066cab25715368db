"""The independent answer: one process, float64, all the data at once, plain autograd, SGD written out.

Nothing of gradsync is in here, nor of torch's optimizers.
"""

from __future__ import annotations

import copy

import torch
from torch import nn


def rows_of(seed: int, rows: int, width: int = 3, dtype=torch.float64) -> torch.Tensor:
    """The same data wherever it is asked for."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def micro_batch(rank: int, index: int, rows: int = 4, dtype=torch.float64, width: int = 3) -> torch.Tensor:
    return rows_of(1000 * rank + index, rows, width, dtype)


def mean_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + output.sum() * 0.1


def mean_loss(model, x):
    return mean_of(model(x))


def sum_loss(model, x):
    return model(x).square().sum()


def window_mean(model, window):
    """The loss of a whole window of (rank, index)."""
    return sum(mean_loss(model, micro_batch(r, i)) for r, i in window) / len(window)


def cut(lengths: list[int], steps) -> list[list[tuple[int, int]]]:
    """Which (rank, index) fall into each window, where ranks count their own micro-batches."""
    windows, start = [], 0
    for window in range(10**6):
        size = steps(window) if callable(steps) else steps
        here = [(r, i) for r, n in enumerate(lengths) for i in range(start, min(start + size, n))]
        if not here:
            return windows
        windows.append(here)
        start += size
    raise AssertionError


def train(model: nn.Module, windows, loss_of_window, lr: float = 0.1) -> tuple[list, nn.Module]:
    """The gradients of each update, and the model after the last; `loss_of_window(model, [(rank, index), ...])` is a
    whole window's loss, or None for no update.
    """
    model = copy.deepcopy(model)
    return [grads for grads, _ in _updates(model, windows, loss_of_window, lr)], model


def states(model: nn.Module, windows, loss_of_window, lr: float = 0.1, decay: float = 0.0, clip=None) -> list:
    """The parameters by name after each update; with `clip`, before each the norm that was clipped."""
    model, found = copy.deepcopy(model), []
    for _, norm in _updates(model, windows, loss_of_window, lr, decay, clip):
        found += [] if clip is None else [norm]
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def _updates(model: nn.Module, windows, loss_of_window, lr: float, decay: float = 0.0, clip: float | None = None):
    parameters = list(model.parameters())
    for window in windows:
        loss = loss_of_window(model, window)
        if loss is None:
            continue
        trained = [p for p in parameters if p.requires_grad]
        found = dict(zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True))
        grads = [None if found.get(p) is None else found[p].to_dense() for p in parameters]
        norm = torch.cat([g.flatten() for g in grads if g is not None]).norm()
        if clip is not None:
            grads = [None if g is None else g * min(1.0, clip / (norm.item() + 1e-6)) for g in grads]
        with torch.no_grad():
            for p, g in zip(parameters, grads, strict=True):
                if g is not None:
                    p -= lr * (g + decay * p)
        yield grads, norm
