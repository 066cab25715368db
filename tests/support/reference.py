"""The independent answer: one process, float64, all the data at once, plain autograd, SGD written out.

Nothing of gradsync is in here, nor of torch's optimizers.
"""

from __future__ import annotations

import copy

from torch import nn

from gradsync.verify.reference import cut, mean_of, micro_batch, rows_of, states, updates  # noqa: F401


def mean_loss(model, x):
    return mean_of(model(x))


def sum_loss(model, x):
    return model(x).square().sum()


def window_mean(model, window):
    """The loss of a whole window of (rank, index)."""
    return sum(mean_loss(model, micro_batch(r, i)) for r, i in window) / len(window)


def train(model: nn.Module, windows, loss_of_window, lr: float = 0.1) -> tuple[list, nn.Module]:
    """The gradients of each update, and the model after the last; `loss_of_window(model, [(rank, index), ...])` is a
    whole window's loss, or None for no update.
    """
    model = copy.deepcopy(model)
    return [grads for grads, _ in updates(model, windows, loss_of_window, lr=lr)], model
