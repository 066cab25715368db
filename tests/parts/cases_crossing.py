"""`fit` where gradients travel in another way: beside the next window, in bfloat16, or both."""

import torch
import torch.distributed as dist

import gradsync
from gradsync.parts import halving
from tests.overlap.loop import Model, Plan, optimizer_of, parameters_of, scheduler_of
from tests.parts.cases_decorator import tried_whole
from tests.parts.limited import Limit
from tests.support.reference import micro_batch

STEPS = 3


class Room(torch.nn.Module):
    """A layer that needs memory by the row."""

    def __init__(self):
        super().__init__()
        self.limit, self.where, self.log = 10**9, "forward", []

    def forward(self, x):
        return Limit.apply(x, self.limit, self.where, self.log)


class Limited(Model):
    """tests/overlap's model, with a limit in it."""

    def __init__(self, dtype, where, limit):
        super().__init__(dtype)
        self.room = Room()
        self.room.limit, self.room.where = limit, where
        self.inner.insert(1, self.room)

    def loss_of(self, x, rank, index):
        output = self.inner(x)
        loss = output.square().mean() + output.mean(0).sum() * 0.1 * ROWS  # a mean over rows, and equal to the model's
        return loss + (self.extra * x).mean() if (rank + index // 2) % 3 == 0 else loss


def trained(plan: Plan, where, limits, **options):
    """The parameters after each update, as `on_update` sees them, and the largest number of parts."""
    halving.free = lambda: None
    rank = dist.get_rank()
    model = Limited(getattr(torch, plan.dtype), where, limits[rank])
    optimizer = optimizer_of(plan.optimizer, model)
    seen, most = [], 0

    @gradsync.accumulating(
        STEPS,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler_of(optimizer),
        clip_norm=plan.clip_norm,
        on_update=lambda _: seen.append(parameters_of(model)),
        overlap=plan.m,
        compress="bf16" if plan.compress else None,
        fit=True,
        **options,
    )
    def step(index, x):
        loss = model.loss_of(x, rank, index)
        weight = plan.weight(rank, index)
        return gradsync.LossSum(loss * weight * len(x) / ROWS, weight * len(x) / ROWS) if plan.sums else loss

    with tried_whole:
        for index in step.over(range(sum(counts[rank] for counts in plan.counts))):
            step(index, micro_batch(rank, index, dtype=model.extra.dtype))
            most = max(most, step.progress.parts)
    return seen, most, len(model.room.log)


ROWS = len(micro_batch(0, 0))
