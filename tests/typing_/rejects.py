"""What type checkers must reject: each line marked `# error` and no other. Checked, never run."""

from __future__ import annotations

import torch
from torch import nn

import gradsync
from tests.typing_.accepts import Trainer, train_step


def misuse(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    train_step(model, optimizer)  # error
    train_step(model, optimizer, "text")  # error
    train_step(model, optimizer, x, 1)  # error
    train_step(model, optimizer, batch=x)  # error
    Trainer(model).step()  # error
    Trainer(model).step(x, scale="big")  # error
    gradsync.accumulating(steps="4")  # error
    gradsync.accumulating()  # error
    gradsync.accumulating(steps=4, tail="keep")  # error
    gradsync.accumulating(4, model)  # error
    gradsync.sync_every(model, "4", [x])  # error
    for step, y in gradsync.sync_every(model, 4, [x]):
        step.last = True  # error
        step.backward()  # error
        y.nonsense  # error
    loss: int = train_step(model, optimizer, x)  # error
    train_step.progress.updates = 3  # error
