"""What an optimizer was given."""

from __future__ import annotations

import torch


class Recorder(torch.optim.SGD):
    """SGD that keeps the gradients of each update, whole and dense, wherever their parts are."""

    def __init__(self, params, lr: float = 0.1, **kwargs) -> None:
        super().__init__(params, lr=lr, **kwargs)
        self.seen: list[list[torch.Tensor | None]] = []

    def step(self, closure=None):
        self.seen.append([_whole(p.grad) for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def _whole(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.detach().to_dense().clone()
