"""`weigh`: with which gradient the backward of a micro-batch begins. It is the micro-batch's weight in its window."""

from __future__ import annotations

import torch
from torch.amp import GradScaler

from gradsync._loss import LossSum
from gradsync.functional._update.grad_scaler import Scale, is_scaling
from gradsync.functional._window.window import Window


def weigh(
    window: Window, loss: torch.Tensor | LossSum, scaler: GradScaler | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensor from which to run the backward of a loss, and the gradient to begin with (None: 1)."""
    tensor, seed = (loss.loss, None) if isinstance(loss, LossSum) else (loss, _share_of_mean(window, loss))
    if is_scaling(scaler):
        Scale.insist_on_unscaled(scaler, tensor)
        window.scale = window.scale or Scale.of(scaler, tensor)
        tensor = window.scale.apply(tensor)
    return tensor, seed


def _share_of_mean(window: Window, loss: torch.Tensor) -> torch.Tensor:
    """One over the window's size: bitwise what the backward of `loss / size` passes on, without that division."""
    key = (window.size, loss.dtype, loss.device, loss.shape)
    seeds = window.team.seeds
    seed = seeds.get(key)
    # If the loss is a view of a parameter, the seed itself becomes a gradient, and is written to later.
    if seed is None or seed._version:
        if len(seeds) > 16:  # a user's steps may take any number of values
            seeds.clear()
        seed = seeds[key] = torch.ones_like(loss, requires_grad=False) / window.size
    return seed
