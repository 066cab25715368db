"""What type checkers must accept. Checked, never run."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import assert_type

import gradsync


@gradsync.accumulating(steps=4)
def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).sum()
    return loss


@gradsync.accumulating(lambda window: 1 + window, clip_norm=1.0, tail="carry", nonfinite="skip", skip=ValueError)
def pair(model: nn.Module, *, optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, int]:
    return model(torch.ones(1)).sum(), 1


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters())

    @gradsync.accumulating(steps=2, model=lambda self, *_: self.model, optimizer=lambda self, *_: self.optimizer)
    def step(self, x: torch.Tensor, scale: float = 1.0) -> gradsync.LossSum:
        return gradsync.LossSum(self.model(x).sum() * scale, x.numel())


def use(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    for x in train_step.over(data):
        assert_type(x, torch.Tensor)
        assert_type(train_step(model, optimizer, x), torch.Tensor)
    assert_type(pair(model, optimizer=optimizer), tuple[torch.Tensor, int])
    len(train_step.over(data))
    train_step.flush()
    train_step.reset()
    assert_type(train_step.progress.micro_steps, int)
    train_step.load_state_dict(train_step.state_dict())
    trainer = Trainer(model)
    assert_type(trainer.step(data[0], scale=2.0), gradsync.LossSum)
    for x in trainer.step.over(data):
        trainer.step(x)
    for micro, x in gradsync.sync_every(model, 4, data):
        assert_type(micro, gradsync.MicroStep)
        assert_type(x, torch.Tensor)
        micro.backward(model(x).sum(), count=3)
    for micro in gradsync.sync_every([model, model], lambda window: 2):
        with gradsync.no_sync(model, enabled=not micro.last):
            assert_type(micro.last, bool)
    gradsync.sync_gradients(model, model)
    with gradsync.process_group() as world:
        assert_type(world.rank, int)
    assert_type(gradsync.ddp(model), nn.Module)
    with gradsync.audit(model, optimizer) as report:
        assert_type(report.syncs, int)
