"""Marks on gradients: what became of one is noted on it, with its version, and holds no longer once it has changed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

LEFT = "_gradsync_left"  # a window has left it behind, or an update has used it
KEPT = "_gradsync_kept"  # a loop has ended with it, for a model that is not stepped after each window
REPLAYED = "_gradsync_replayed"  # a replay has made it


def mark(parameters: Iterable[torch.Tensor], what: str) -> None:
    """Mark the gradients of these parameters, as they are now."""
    for parameter in parameters:
        if parameter.grad is not None:
            setattr(parameter.grad, what, parameter.grad._version)


def is_marked(gradient: torch.Tensor, what: str) -> bool:
    """Whether a gradient has that mark, and has not changed since."""
    return bool(vars(gradient).get(what) == gradient._version)
