"""The independent answer: one process, float64, all the data at once, plain autograd."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.support.compare import assert_equal_updates  # noqa: F401


class Recorder(torch.optim.SGD):
    """SGD that keeps what it was given: the gradients of each update."""

    def __init__(self, params, lr: float = 0.1, **kwargs) -> None:
        super().__init__(params, lr=lr, **kwargs)
        self.seen: list[list[torch.Tensor | None]] = []

    def step(self, closure=None):
        self.seen.append([
            None if p.grad is None else p.grad.detach().to_dense().clone()
            for group in self.param_groups
            for p in group["params"]
        ])
        return super().step(closure)


def small_model(dtype=torch.float64, unused: bool = False) -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    if unused:
        model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=dtype)))
    return model


def micro_batch(rank: int, index: int, rows: int = 4, dtype=torch.float64) -> torch.Tensor:
    """The same data wherever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return torch.randn(rows, 3, generator=generator, dtype=dtype)


def mean_loss(model, x):
    y = model(x)
    return y.square().mean() + y.sum() * 0.1


def sum_loss(model, x):
    return model(x).square().sum()


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
    """SGD over windows; `loss_of_window(model, [(rank, index), ...])` is the whole window's loss."""
    model = copy.deepcopy(model)
    seen = []
    parameters = list(model.parameters())
    for window in windows:
        loss = loss_of_window(model, window)
        if loss is None:
            continue
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        grads = [None if g is None else g.to_dense() for g in grads]
        seen.append(grads)
        with torch.no_grad():
            for p, g in zip(parameters, grads):
                if g is not None:
                    p -= lr * g
    return seen, model


def window_mean(model, window):
    return sum(mean_loss(model, micro_batch(r, i)) for r, i in window) / len(window)
