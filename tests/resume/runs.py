"""Runs of every kind that can be saved and gone on with: here, and on real ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import LossSum, accumulating
from tests.support.compare import assert_equal_state
from tests.support.files import through_a_file
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch, sum_loss

NUM = 7  # micro-batches: two windows of 3, and a tail or a window that stays open


class Bad(Exception):
    """A record that cannot be used."""


class Run:
    """One training run of some kind; all its objects are its own, as in a process of its own."""

    def __init__(self, kind: str = "mean", rank: int = 0) -> None:
        self.kind, self.rank = kind, rank
        self.model = small_model(unused=kind in {"find_unused", "unused"})
        options: dict = {"steps": 3}
        extra: list = []
        if kind in {"buffers", "buffers ddp"}:
            self.model = nn.Sequential(nn.BatchNorm1d(3).double(), self.model)
        if kind == "two models":
            self.model = nn.ModuleList([self.model, small_model()])
        if kind == "function":
            options["steps"] = lambda window: window + 2
        if kind in {"carry", "each"}:
            options |= {"tail": "carry"} if kind == "carry" else {"sync": "each"}
        if kind == "skip":
            options["skip"] = Bad
        if kind == "clip":
            options["clip_norm"] = 0.1
        if kind == "not in a module":
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
            extra = [self.scale]
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *extra], lr=0.1, momentum=0.9)
        self.others: list = []
        if kind == "scheduler":
            self.others = [torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)]
        if kind == "scaler":
            self.others = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)]
        wraps = {
            "ddp": {}, "buffers ddp": {}, "static": {"static_graph": True}, "views": {"gradient_as_bucket_view": True},
            "find_unused": {"find_unused_parameters": True},
        }  # fmt: skip
        home = DDP(self.model, **wraps[kind]) if kind in wraps else self.model
        self.homes = list(home) if kind == "two models" else [home]
        self.step = accumulating(**options)(self.body)

    def body(self, optimizer, i, *rest):
        *models, x = rest[: len(self.homes)] + (micro_batch(self.rank, i),)
        if self.kind == "skip" and i % 3 == 1:
            raise Bad
        if self.kind.startswith("sum"):
            # A whole number that a float32 does not hold, as a tensor.
            count = {"sum": int, "sum float": float, "sum tensor": torch.tensor}[self.kind](x.numel() + i + 2**25)
            return LossSum(sum_loss(models[0], x), count)
        loss = sum(mean_loss(model, x) for model in models)
        return loss * self.scale if self.kind == "not in a module" else loss

    def call(self, i: int) -> None:
        self.step(self.optimizer, i, *self.homes, *self.others)

    @property
    def stateful(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step} | {
            f"other {i}": other for i, other in enumerate(self.others)
        }

    def save(self) -> dict:
        state = {name: one.state_dict() for name, one in self.stateful.items()}
        if self.kind == "not in a module":
            state["scale"] = self.scale.detach().clone()
        return through_a_file(state)

    def load(self, state: dict) -> None:
        for name, one in self.stateful.items():
            one.load_state_dict(state[name])
        if self.kind == "not in a module":
            with torch.no_grad():
                self.scale.copy_(state["scale"])

    def result(self) -> dict:
        """Everything that must be the same to the bit."""
        progress = self.step.progress
        facts = {
            name: getattr(progress, name)
            for name in ("micro_steps", "updates", "window", "index", "skipped", "dropped", "replays")
        }
        tensors = {**self.model.state_dict()}
        if self.kind == "not in a module":
            tensors["scale"] = self.scale.detach()
        return {**facts, **{name: tensor.clone() for name, tensor in tensors.items()}}


def finish(run: Run, start: int, how: str, num: int = NUM) -> dict:
    if how == "over":
        for i in run.step.over(range(start, num)):
            run.call(i)
    else:
        for i in range(start, num):
            run.call(i)
        if how == "flush":
            run.step.flush()
    result = run.result()
    run.step.reset()
    return result


def resumed_anywhere(kind: str, how: str, lengths: list[int] | None = None) -> None:
    """Saved after any micro-batch and gone on with in fresh objects, it ends as if nothing had been."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    num = NUM if lengths is None else lengths[rank]
    expected = finish(Run(kind, rank), 0, how, num)
    for stop in range(min(lengths or [num])):
        run = Run(kind, rank)
        if how == "over":
            for i in run.step.over(range(num)):  # it has looked one item ahead: progress tells what was learnt from
                if i == stop:
                    break
                run.call(i)
        else:
            for i in range(stop):
                run.call(i)
        state = run.save()
        before = run.step.progress
        run.step.reset()
        again = Run(kind, rank)
        again.load(state)
        now = again.step.progress
        assert (now.micro_steps, now.window, now.index) == (stop, before.window, before.index)
        # A static graph synchronises its very first micro-batch, once more in each process: equal, but added otherwise.
        try:
            assert_equal_state(expected, finish(again, now.micro_steps, how, num), 1e-14 if kind == "static" else 0.0)
        except AssertionError as error:
            raise AssertionError(f"resumed after {stop}: {error}") from error
