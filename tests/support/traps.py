"""Functions that go wrong in backward."""

from __future__ import annotations

import torch


class Trap(torch.autograd.Function):
    """The identity; its backward raises `error`, unless that is None."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.error is not None:
            raise ctx.error
        return gradient, None


class Poison(torch.autograd.Function):
    """Zero, with a gradient of inf."""

    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, float("inf"))
