"""The micro-batches of programs: plain dicts, the data that they stand for, and what they give.

`seed` and `rows` make the data, `event` is what happens in the body: "ok", "nan", "skip" / "skip_late" (a type in `skip`,
before or after the forward), "raise" / "raise_late" (an error that the loop catches), "backward" / "backward_deep" (an error
in the backward, at its beginning or half way through), "spoil" / "spoil_deep" (a type in `skip` there, which drops the
whole window on every rank).
"""

from __future__ import annotations

import torch

from tests.support.reference import rows_of

LEARNING_RATE = 0.02
FAILS = {"raise", "raise_late", "backward", "backward_deep"}
SKIPS = {"skip", "skip_late"}
SPOILS = {"spoil", "spoil_deep"}


class Boom(Exception):
    """What a body raises."""


class SkipMe(Exception):
    """What a body raises that may be skipped."""


def data(micro_batch: dict) -> torch.Tensor:
    """The same wherever it is asked for."""
    return rows_of(micro_batch["seed"], micro_batch["rows"])


def loss_of(y: torch.Tensor, kind: str) -> torch.Tensor:
    return y.square().sum() + 0.1 * y.sum() if kind == "sum" else y.square().mean() + 0.1 * y.mean()


def forward(parameters: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`Square` once more, on plain tensors."""
    tensors = [p for p in parameters if p.numel() != 2]
    w, b, v, c = tensors
    return torch.tanh(x @ w.T + b) @ v.T + c
