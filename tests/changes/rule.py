"""The rule that everything in this directory tests, and the runs that it is tested with.

Whatever people change, share or bring: the result is exact against float64 on every rank, or a `GradSyncError` on every rank
that says what is wrong and what to do. Never a third thing: no error of torch's, no hang, no ranks that differ silently.
A story is a function that trains with a `Run`, changes something and trains on. `told` tells it twice on each rank, once on
one process with everybody's data and plain autograd, once with gradsync, and says which of the two outcomes it had.
"""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import GradSyncError, accumulating
from tests.support.reference import micro_batch

LIMIT = 30.0  # seconds for a case: what is right takes far less, and what hangs today ends here


class Outcome(NamedTuple):
    """What became of a story on a rank: "exact", "error" (a GradSyncError), or what the rule forbids: "off", "foreign"."""

    kind: str
    text: str = ""


def exact_or_error(outcomes: list[Outcome], says: str = "", only: str = "") -> str:
    """Demand the rule of all ranks: all exact, or all with an error that says `says`; which of the two it was.

    `only` is for what the contract leaves no choice about: "exact" or "error".
    """
    outcomes = [Outcome(*one) for one in outcomes]
    told = "\n".join(f"rank {rank}: {one.kind} {one.text}" for rank, one in enumerate(outcomes))
    kinds = {one.kind for one in outcomes}
    assert kinds <= {"exact", "error"}, told
    assert len(kinds) == 1, "the ranks do not agree\n" + told
    (kind,) = kinds
    assert only in {"", kind}, f"expected {only}\n{told}"
    for one in outcomes:
        if one.kind == "error":
            assert re.search(says, one.text, re.IGNORECASE), f"does not say {says!r}\n{told}"
            assert len(one.text.split()) > 8, f"does not say what to do\n{told}"
    return kind


def outcomes(ranks, size: int, case: Callable, *args: object, limit: float = LIMIT) -> list[Outcome]:
    """`case(*args)` on `size` ranks; on one it runs right here, without a process group."""
    return [case(*args)] if size == 1 else ranks(size).run(case, *args, limit=limit)


def my_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Net(nn.Module):
    """An embedding, two equal layers and a head, all of them used in every forward."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(4, 5)
        self.inp = nn.Linear(3, 5)
        self.body = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh())
        self.head = nn.Linear(5, 2)
        self.double()

    def forward(self, x):
        x = x.to(self.head.weight.dtype)
        ids = (x[:, 0].abs() * 10).long() % self.emb.num_embeddings
        return self.head(self.body(self.inp(x) + self.emb(ids)))


def layer(*shape: int, seed: int = 11) -> nn.Linear:
    """A new layer, the same on every rank."""
    torch.manual_seed(seed)
    return nn.Linear(*shape).double()


def sum_of_models(*models_and_x):
    """The loss of every story that brings none of its own."""
    *models, x = models_and_x
    total = 0.0
    for model in models:
        y = model(x)
        total = total + y.square().mean() + y.sum() * 0.1
    return total


class Run:
    """A training run; a story trains with it and changes `models`, `optimizer`, `loss` or `extra` in between.

    `how` is "reference", "accumulating" (a function for the whole story), "accumulating anew" (a function for each `train`),
    "sync_every" (an iterator for the whole story) or "sync_every anew". Gradients of weight decay tell None from zeros.
    """

    def __init__(self, how: str, wrap: str, steps: int, **options) -> None:
        self.how, self.wrap, self.steps, self.options = how, wrap, steps, options
        self.model = Net()
        self.models: list[nn.Module] = [self.model]
        self.extra: dict[str, nn.Parameter] = {}
        self.loss: Callable = sum_of_models
        self.optimizer = self.sgd(self.model)
        self.optimizers: list[torch.optim.Optimizer] | None = None
        self.drawn = 0
        self.trace: list[dict[str, torch.Tensor]] = []
        self._wrapped: dict[nn.Module, nn.Module] = {}
        self._step = self._micro_steps = self._homes = None
        if how.startswith("accumulating"):
            self._step = self._function()

    # -- what a story may do

    def sgd(self, *owners) -> torch.optim.Optimizer:
        """A new optimizer over models, parameters or lists of them, each parameter once."""
        found: list[nn.Parameter] = []
        for one in owners:
            found += one.parameters() if isinstance(one, nn.Module) else [one] if isinstance(one, nn.Parameter) else one
        return torch.optim.SGD(list(dict.fromkeys(found)), lr=0.1, weight_decay=0.05)

    def train(self, windows: int = 2) -> None:
        if self.how.endswith("anew"):
            self.end()
            self._step = self._function()
        for _ in range(windows * self.steps):
            self.micro()

    def micro(self) -> None:
        """One micro-batch on each rank."""
        boundary = self.drawn % self.steps == self.steps - 1
        if self.how == "reference":
            for rank in range(world_size()):
                loss = self.loss(*self.models, micro_batch(rank, self.drawn))
                (loss / (world_size() * self.steps)).backward()
            if boundary:
                self._update()
        else:
            x = micro_batch(my_rank(), self.drawn)
            homes = [self._home(model) for model in self.models]
            if self._step is not None:
                self._step(*homes, *(self.optimizers or [self.optimizer]), x)
            else:
                self._sync_every(homes, x)
        self.drawn += 1
        if boundary:
            self.trace.append({name: p.detach().double().clone() for name, p in self.tracked().items()})

    def rewrap(self) -> None:
        """The models on engines made anew, which is the user's way of telling that they have changed."""
        self.end()
        self._wrapped.clear()
        gc.collect()

    def unwrap(self) -> None:
        """From here on without DDP: a sub-module that is taken out."""
        self.rewrap()
        self.wrap = "bare"

    def tracked(self) -> dict[str, torch.Tensor]:
        models = {f"{place}.{n}": p for place, m in enumerate(self.models) for n, p in m.named_parameters()}
        return models | self.extra

    def end(self) -> None:
        if self._micro_steps is not None:
            self._micro_steps.close()
        self._micro_steps = self._homes = None

    # -- how it is done

    def _function(self):
        if not self.how.startswith("accumulating"):
            return None

        @accumulating(steps=self.steps, **self.options)
        def train_step(*args):
            return self.loss(*[a for a in args if not isinstance(a, torch.optim.Optimizer)])

        return train_step

    def _update(self) -> None:
        for optimizer in self.optimizers or [self.optimizer]:
            optimizer.step()
            optimizer.zero_grad()

    def _home(self, model: nn.Module) -> nn.Module:
        if self.wrap == "bare" or not dist.is_initialized() or not any(p.requires_grad for p in model.parameters()):
            return model
        if model not in self._wrapped:
            self._wrapped[model] = DDP(model)
        return self._wrapped[model]

    def _sync_every(self, homes: list[nn.Module], x) -> None:
        if self._homes is None or list(map(id, homes)) != list(map(id, self._homes)):
            self.end()
            self._homes = homes
            self._micro_steps = gradsync.sync_every(homes[0] if len(homes) == 1 else homes, self.steps)
        step = next(self._micro_steps)
        step.backward(self.loss(*homes, x))
        if step.last:
            self._update()


class NotExact(AssertionError):
    """Where a run parts from the reference."""


def compare(ours: list[dict], expected: list[dict], tolerance: float = 1e-10) -> None:
    """Window for window, parameter for parameter."""
    for window, (mine, right) in enumerate(zip(ours, expected)):
        if mine.keys() != right.keys():
            raise NotExact(f"window {window}: other parameters, {mine.keys() ^ right.keys()}")
        for name, value in right.items():
            error = (mine[name] - value).abs().max().item()
            if not error <= tolerance:
                raise NotExact(f"after window {window}, {name} is off by {error:.1e}")


def told(story: Callable[[Run], None], how: str, wrap: str, steps: int, tolerance: float = 1e-10, **options) -> Outcome:
    """Tell a story by hand and with gradsync, and say how it ended on this rank."""
    reference = Run("reference", wrap, steps)
    story(reference)
    reference.end()
    run = Run(how, wrap, steps, **options)
    try:
        return Outcome(*_lived(story, run, reference, tolerance))
    finally:
        run.end()


def _lived(story, run: Run, reference: Run, tolerance: float) -> tuple[str, str]:
    error = None
    try:
        story(run)
    except GradSyncError as raised:
        error = str(raised)
    except AssertionError as failed:
        return "off", str(failed)
    except Exception:  # noqa: BLE001 - whatever torch says
        return "foreign", traceback.format_exc(limit=-3)
    try:  # an error excuses no wrong window before it
        compare(run.trace, reference.trace, tolerance)
    except NotExact as parted:
        return "off", str(parted)
    if error is not None:
        return "error", error
    if len(run.trace) != len(reference.trace):
        return "off", f"{len(run.trace)} windows instead of {len(reference.trace)}"
    return "exact", ""
