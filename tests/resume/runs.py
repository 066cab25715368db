"""Runs of every kind that can be saved and gone on with: here, and on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

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


def means(models, x, i: int):
    return sum(mean_loss(model, x) for model in models)


def means_but_of_bad_records(models, x, i: int):
    if i % 3 == 1:
        raise Bad
    return means(models, x, i)


def sums(number, models, x, i: int):
    """Their counts are whole numbers that a float32 does not hold."""
    return LossSum(sum_loss(models[0], x), number(x.numel() + i + 2**25))


def with_buffers():
    return nn.Sequential(nn.BatchNorm1d(3).double(), small_model())


def two_models():
    return nn.ModuleList([small_model(), small_model()])


def bare(model) -> list:
    return [model]


def on_ddp(model, **settings) -> list:
    return [DDP(model, **settings)]


def scaler(optimizer):
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)


@dataclass(frozen=True)
class Kind:
    """How a run is made; the ranks get it by its values, so that its functions have names."""

    name: str
    options: dict = field(default_factory=dict)  # of the decorator
    loss: Callable = means
    new_model: Callable = small_model
    homes: Callable = bare
    others: tuple[Callable, ...] = ()  # other participants, of its optimizer
    num_loose: int = 0  # parameters that the optimizer has, and no model
    tolerance: float = 0.0


MEAN = Kind("mean")
SUM = Kind("sum", loss=partial(sums, int))
SUM_FLOAT = Kind("sum float", loss=partial(sums, float))
SUM_TENSOR = Kind("sum tensor", loss=partial(sums, torch.tensor))
SCALER = Kind("scaler", others=(scaler,))
SCHEDULER = Kind("scheduler", others=(partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),))
CLIP = Kind("clip", {"clip_norm": 0.1})
SKIP = Kind("skip", {"skip": Bad}, means_but_of_bad_records)
TWO_MODELS = Kind("two models", new_model=two_models, homes=list)
NOT_IN_A_MODULE = Kind("not in a module", num_loose=1)
BUFFERS = Kind("buffers", new_model=with_buffers)
UNUSED = Kind("unused", new_model=partial(small_model, unused=True))
FUNCTION = Kind("function", {"steps": lambda window: window + 2})
EACH = Kind("each", {"sync": "each"})
CARRY = Kind("carry", {"tail": "carry"})
ON_DDP = Kind("ddp", homes=on_ddp)
BUFFERS_ON_DDP = Kind("buffers ddp", new_model=with_buffers, homes=on_ddp)
# A static graph synchronises its very first micro-batch, once more in each process: equal, but added otherwise.
STATIC = Kind("static", homes=partial(on_ddp, static_graph=True), tolerance=1e-14)
VIEWS = Kind("views", homes=partial(on_ddp, gradient_as_bucket_view=True))
FIND_UNUSED = Kind("find_unused", new_model=UNUSED.new_model, homes=partial(on_ddp, find_unused_parameters=True))


class Run:
    """One training run of some kind; all its objects are its own, as in a process of its own."""

    def __init__(self, kind: Kind = MEAN, rank: int = 0) -> None:
        self.kind, self.rank = kind, rank
        self.model = kind.new_model()
        self.loose = [nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(kind.num_loose)]
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.loose], lr=0.1, momentum=0.9)
        self.others = [other(self.optimizer) for other in kind.others]
        self.homes = kind.homes(self.model)
        self.step = accumulating(**{"steps": 3, **kind.options})(self.body)

    def body(self, optimizer, i, *rest):
        loss = self.kind.loss(rest[: len(self.homes)], micro_batch(self.rank, i), i)
        for parameter in self.loose:
            loss = loss * parameter
        return loss

    def call(self, i: int) -> None:
        self.step(self.optimizer, i, *self.homes, *self.others)

    @property
    def stateful(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step} | {
            f"other {i}": other for i, other in enumerate(self.others)
        }

    @property
    def loose_values(self) -> dict:
        return {f"loose {i}": parameter.detach() for i, parameter in enumerate(self.loose)}

    def save(self) -> dict:
        state = {name: one.state_dict() for name, one in self.stateful.items()}
        return through_a_file(state | self.loose_values)

    def load(self, state: dict) -> None:
        for name, one in self.stateful.items():
            one.load_state_dict(state[name])
        with torch.no_grad():
            for i, parameter in enumerate(self.loose):
                parameter.copy_(state[f"loose {i}"])

    def result(self) -> dict:
        """Everything that must be the same to the bit."""
        progress = self.step.progress
        facts = {
            name: getattr(progress, name)
            for name in ("micro_steps", "updates", "window", "index", "skipped", "dropped", "replays")
        }
        tensors = self.model.state_dict() | self.loose_values
        return {**facts, **{name: tensor.clone() for name, tensor in tensors.items()}}


def calls(run: Run, start: int, num: int, stop: int | None = None) -> None:
    """All micro-batches from `start` on; this loop, as each one, is left before `stop`."""
    for i in range(start, num):
        if i == stop:
            break
        run.call(i)


def flush(run: Run, start: int, num: int, stop: int | None = None) -> None:
    calls(run, start, num, stop)
    if stop is None:
        run.step.flush()


def over(run: Run, start: int, num: int, stop: int | None = None) -> None:
    for i in run.step.over(range(start, num)):  # it has looked one item ahead: progress tells what was learnt from
        if i == stop:
            break
        run.call(i)


def finish(run: Run, start: int, loop, num: int = NUM) -> dict:
    loop(run, start, num)
    result = run.result()
    run.step.reset()
    return result


def resumed_anywhere(kind: Kind, loop, lengths: list[int] | None = None) -> None:
    """Saved after any micro-batch and gone on with in fresh objects, it ends as if nothing had been."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    num = NUM if lengths is None else lengths[rank]
    expected = finish(Run(kind, rank), 0, loop, num)
    for stop in range(min(lengths or [num])):
        run = Run(kind, rank)
        loop(run, 0, num, stop)
        state = run.save()
        before = run.step.progress
        run.step.reset()
        again = Run(kind, rank)
        again.load(state)
        now = again.step.progress
        assert (now.micro_steps, now.window, now.index) == (stop, before.window, before.index)
        try:
            assert_equal_state(expected, finish(again, now.micro_steps, loop, num), kind.tolerance)
        except AssertionError as error:
            raise AssertionError(f"resumed after {stop}: {error}") from error
