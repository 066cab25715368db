"""What runs on the ranks for test_decorated.py, test_events.py, test_beside.py and test_programs.py: a decorated step under `overlap`."""

from __future__ import annotations

import torch
import torch.distributed as dist

import gradsync
from tests.overlap.loop import Model, Plan, optimizer_of, parameters_of, scheduler_of, state_of
from tests.support.traps import Trap


class Training:
    """A decorated step, and what the parameters were in each `on_update`."""

    def __init__(self, plan: Plan, device: str = "cpu", **options) -> None:
        self.plan, self.rank = plan, dist.get_rank() if dist.is_initialized() else 0
        self.model = Model(getattr(torch, plan.dtype), plan.dropout).to(device)
        self.optimizer = optimizer_of(plan.optimizer, self.model)
        self.scheduler = scheduler_of(self.optimizer)
        self.seen: list[list[torch.Tensor]] = []
        self.told: list[gradsync.Progress] = []
        self.fails_at: int | None = None

        @gradsync.accumulating(
            plan.steps if isinstance(plan.steps, int) else plan.size,
            model=self.model,
            optimizer=getattr(self.optimizer, "both", self.optimizer),
            scheduler=getattr(self.scheduler, "both", self.scheduler),
            clip_norm=plan.clip_norm,
            tail=plan.tail,
            nonfinite="skip" if plan.infinite else "step",
            skip=KeyError if plan.broken or plan.breaking else (),
            on_update=self.note,
            overlap=plan.m,
            compress="bf16" if plan.compress else None,
            **options,
        )
        def step(index):
            if index == self.fails_at:
                raise ZeroDivisionError
            if (self.rank, index) in plan.broken:
                raise KeyError
            loss = self.model.loss(self.rank, index)
            if (self.rank, index) in plan.infinite:
                loss = loss * float("nan")
            if (self.rank, index) in plan.breaking:
                loss = Trap.apply(loss, KeyError())
            weight = plan.weight(self.rank, index)
            return gradsync.LossSum(loss * weight, weight) if plan.sums else loss

        self.step = step
        torch.set_rng_state(state_of(self.rank))

    def note(self, progress: gradsync.Progress) -> None:
        self.told.append(progress)
        self.seen.append(parameters_of(self.model))

    @property
    def parameters(self) -> list[torch.Tensor]:
        return parameters_of(self.model)


def trained(plan: Plan, how: str = "known", **options) -> list[list[torch.Tensor]]:
    """The parameters after each update, as `on_update` sees them."""
    training = Training(plan, **options)
    length = sum(counts[training.rank] for counts in plan.counts)
    items = iter(range(length)) if how == "unknown" else range(length)
    for index in items if how == "flush" else training.step.over(items):
        if plan.alone:
            progress = training.step.progress
            if (training.rank, progress.window, progress.index) in plan.alone:
                training.model.state_dict()
        training.step(index)
    if how == "flush":
        training.step.flush()
    assert all(parameter.grad is None for parameter in training.model.parameters())
    if training.seen:
        assert all(torch.equal(a, b) for a, b in zip(training.parameters, training.seen[-1])), "it has landed"
    assert [progress.updates for progress in training.told] == list(range(1, len(training.seen) + 1))
    return training.seen


