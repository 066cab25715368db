"""Runs that can be saved and gone on with, for test_resume.py: here, and on real ranks."""

from __future__ import annotations

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import LossSum, accumulating
from tests.support.reference import mean_loss, micro_batch, small_model, sum_loss

NUM = 7  # micro-batches: two windows of 3, and a tail or a window that stays open


class Bad(Exception):
    """A record that cannot be used."""


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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


def same(a: dict, b: dict, tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            off = (value - b[name]).abs().max()
            assert torch.equal(value, b[name]) or off < tolerance, f"{name} differs by {off}"
        else:
            assert value == b[name], f"{name}: {value} and {b[name]}"


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
            same(expected, finish(again, now.micro_steps, how, num), 1e-14 if kind == "static" else 0.0)
        except AssertionError as error:
            raise AssertionError(f"resumed after {stop}: {error}") from error


def a_state_for_other_ranks() -> str:
    """It was saved by one process, and is loaded on two."""
    run = Run("mean", dist.get_rank())
    run.call(0)
    state = run.step.state_dict()
    run.step.reset()
    state["windows"][0]["num_ranks"] = 1
    run.step.load_state_dict  # noqa: B018
    try:
        run.step.load_state_dict(state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def bare_and_ddp() -> None:
    """The same names with and without a wrapper: what was saved on one can be loaded on the other."""
    rank = dist.get_rank()
    expected = finish(Run("ddp", rank), 0, "over")
    for one, other in (("ddp", "mean"), ("mean", "ddp")):
        run = Run(one, rank)
        for i in range(5):
            run.call(i)
        state = run.save()
        run.step.reset()
        again = Run(other, rank)
        again.load(state)
        same(expected, finish(again, 5, "over"))


def every_sample_once(stop: int) -> list[list[int]]:
    """The samples that this rank learnt from, by epoch, in a run that is cut and gone on with."""
    rank, size = dist.get_rank(), dist.get_world_size()
    in_epoch, seen, state = 5, [[], []], None
    for limit in (stop, 10**6):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @accumulating(steps=2)
        def step(model, optimizer, numbers, epoch):
            seen[epoch] += numbers
            return mean_loss(model, micro_batch(0, numbers[0]))

        if state is not None:
            step.load_state_dict(state)
        for epoch in range(step.progress.micro_steps // in_epoch, 2):
            order = torch.randperm(in_epoch * size * 3, generator=torch.Generator().manual_seed(epoch)).view(-1, 3)
            mine = order[rank::size].tolist()
            for numbers in step.over(mine[step.progress.micro_steps - epoch * in_epoch :]):
                step(model, optimizer, numbers, epoch)
                if step.progress.micro_steps == limit:
                    break
            else:
                continue
            break
        state = through_a_file(step.state_dict())
        step.reset()
    return seen
