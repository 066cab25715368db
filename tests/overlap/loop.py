"""A loop with overlap, written out: what a driver does with `gradsync.overlap`, on a DDP behind a bare model."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync.engines._ddp_usable import Joint
from gradsync.functional import clip, normalise
from gradsync.overlap import InFlight, travel_of, depart, landing, step_ahead
from gradsync.overlap.saved import Saved
from tests.support.reference import mean_loss, micro_batch


class Model(nn.Module):
    """`extra` is used by some micro-batches, and `never` by none."""

    def __init__(self, dtype=torch.float64, dropout=0.0):
        super().__init__()
        torch.manual_seed(7)
        self.dropout = dropout
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.extra = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(2))
        self.to(dtype)

    def loss(self, rank: int, index: int):
        x = micro_batch(rank, index, dtype=self.extra.dtype).to(self.extra.device)
        x = nn.functional.dropout(x, self.dropout)
        loss = mean_loss(self.inner, x)
        return loss + (self.extra * x).mean() if (rank + index // 2) % 3 == 0 else loss


@dataclass(frozen=True)
class Plan:
    """`counts[window][rank]` micro-batches, of which the first `m` run while gradients travel."""

    counts: tuple[tuple[int, ...], ...]
    m: int
    optimizer: str = "sgd"
    clip_norm: float | None = None
    dtype: str = "float64"
    sums: bool = False  # whether losses are sums, over another number of items in each micro-batch
    broken: tuple[tuple[int, int], ...] = ()  # (rank, index) of micro-batches that bring nothing
    infinite: tuple[tuple[int, int], ...] = ()  # (rank, index) of those whose loss is no number
    compress: bool = False  # whether gradients travel in bfloat16; simulated for 2 ranks, whose sum has one order
    steps: int | tuple[int, ...] = 3  # what windows are planned for; of a tuple, one after another, and again
    breaking: tuple[tuple[int, int], ...] = ()  # (rank, index) of those whose backward raises
    tail: str = "step"
    dropout: float = 0.0
    weightless: tuple[int, ...] = ()  # indices of micro-batches whose sums are over nothing, on all ranks
    alone: tuple[tuple[int, int, int], ...] = ()  # (rank, window, index) before which a rank saves its model

    def first_true(self, rank: int, window: int) -> int:
        """Before which of its micro-batches a rank lands what travels beside a window."""
        return min([self.m, *(index for r, w, index in self.alone if (r, w) == (rank, window))])

    def size(self, window: int) -> int:
        """What a window is planned for."""
        return self.steps if isinstance(self.steps, int) else self.steps[window % len(self.steps)]

    def weight(self, rank: int, index: int) -> int:
        """What a micro-batch's loss is a sum over; 1 for means."""
        if (rank, index) in self.broken or index in self.weightless:
            return 0
        return (3 * rank + 2 * index) % 5 if self.sums else 1


class Two:
    """Two optimizers, or two schedulers, as one to a loop by hand."""

    def __init__(self, *both) -> None:
        self.both = both

    def step(self) -> None:
        for one in self.both:
            one.step()

    def zero_grad(self) -> None:
        for one in self.both:
            one.zero_grad()


def optimizer_of(name: str, model: nn.Module):
    parameters = list(model.parameters())
    if name == "two":
        return Two(torch.optim.SGD(parameters[:3], lr=0.3, momentum=0.9), torch.optim.AdamW(parameters[3:], lr=0.05))
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, dampening=0.2, weight_decay=0.1)
    kind = {name: True} if name in ("foreach", "fused", "capturable") else {"foreach": False}
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, **kind)


def scheduler_of(optimizer):
    if isinstance(optimizer, Two):
        return Two(*map(scheduler_of, optimizer.both))
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


class Behind:
    """A DDP of the model's parameters and a ledger, armed by hand, as the engine behind bare modules does."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        shell = nn.Module()
        odd = torch.float32 if self.parameters[0].dtype == torch.float64 else torch.float64
        shell.ledger = self.ledger = nn.Parameter(torch.zeros(len(self.parameters), dtype=odd))
        shell.model = model
        self.ddp = DDP(shell)
        self.travel = travel_of(self.ddp, ledger=self.ledger, flagged=self.parameters)

    def boundary(self, loss):
        """Synchronise; the flight, and on the parameters what this rank itself has accumulated."""
        self.travel.begin()
        self.ddp.reducer.prepare_for_forward()
        self.ddp.reducer.prepare_for_backward([])
        if loss is not None:
            loss.backward()
        used = [parameter.grad is not None for parameter in self.parameters]
        self.ledger.backward(torch.tensor(used, dtype=self.ledger.dtype))
        rest = self.parameters if loss is None else self._unready()
        if rest:
            Joint.apply(*rest).backward()
        self.ddp.reducer._rebuild_buckets()
        flight = self.travel.end()
        own, self.ledger.grad = self.ledger.grad.tolist(), None  # as it came
        assert own == used
        for parameter, here in zip(self.parameters, own):
            if not here:
                parameter.grad = None
        return flight

    def _unready(self):
        try:
            self.ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            indices = str(error).split("did not receive grad for rank")[1].split(":")[1].split("\n")[0].split()
            return [[self.ledger, *self.parameters][int(i)] for i in indices if i.isdigit()]
        return []


def memory_of(landed: InFlight | None) -> Saved | None:
    """What a window that has landed leaves for the next, as the decorator hands it on."""
    saved = None if landed is None else landed.saved or landed.spare
    return None if saved is None else saved.emptied()


def drive(plan: Plan) -> list[list[torch.Tensor]]:
    """The parameters after each landing, on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Model(getattr(torch, plan.dtype))
    optimizer = optimizer_of(plan.optimizer, model)
    scheduler = scheduler_of(optimizer)
    behind = Behind(model)
    seen: list[list[torch.Tensor]] = []
    in_flight = last = None  # what travels, and what has landed last
    total = taken = 0

    def land() -> None:
        nonlocal in_flight, last
        if in_flight is None:
            return
        with landing(in_flight):
            normalise(model.parameters(), size / total)
            if plan.clip_norm is not None:
                clip(list(model.parameters()), plan.clip_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        in_flight, last = None, in_flight
        seen.append(parameters_of(model))

    for counts in plan.counts:
        flight = None
        for index in range(counts[rank]):
            loss = model.loss(rank, taken + index)
            if index < counts[rank] - 1:
                loss.backward()
            else:
                flight = behind.boundary(loss)
            if index == plan.m - 1:
                land()
        if flight is None:
            flight = behind.boundary(None)
        land()  # a window shorter than m
        taken += counts[rank]
        total = sum(counts)
        in_flight = replace(depart([flight], [optimizer], [model], land), spare=memory_of(last))
        factor = 1 / counts[rank] if counts[rank] else None
        in_flight = step_ahead(in_flight, factor=factor, clip_norm=plan.clip_norm)
    land()
    assert all(parameter.grad is None for parameter in model.parameters())
    return seen


def simulate(plan: Plan) -> list[list[torch.Tensor]]:
    """The same on one process: each rank's provisional parameters are a copy of its own."""
    ranks = range(len(plan.counts[0]))
    model = Model(dropout=plan.dropout)
    random = [state_of(rank) for rank in ranks]
    optimizer = optimizer_of("adamw" if plan.optimizer in ("foreach", "fused", "capturable") else plan.optimizer, model)
    scheduler = scheduler_of(optimizer)
    ahead = [model for _ in ranks]
    seen: list[list[torch.Tensor]] = []
    travelling: list | None = None
    taken = [0 for _ in ranks]

    def step(model, optimizer, gradients) -> None:
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient
        if plan.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    for window, counts in enumerate(plan.counts):
        before = copy.deepcopy(model)
        if travelling is not None and is_finite(travelling):
            step(model, optimizer, travelling)
            scheduler.step()
            seen.append(parameters_of(model))
        own = []
        for rank in ranks:
            sums = [None for _ in model.parameters()]
            for index in range(counts[rank]):
                if (rank, taken[rank] + index) in plan.broken:
                    continue
                early = index < plan.first_true(rank, window) and travelling is not None
                at = (before if ahead[rank] is model else ahead[rank]) if early else model
                torch.set_rng_state(random[rank])
                loss = at.loss(rank, taken[rank] + index) * (plan.weight(rank, taken[rank] + index) if plan.sums else 1)
                random[rank] = torch.get_rng_state()
                if (rank, taken[rank] + index) in (*plan.infinite, *plan.breaking):
                    loss = loss * float("nan")
                for place, g in enumerate(torch.autograd.grad(loss, list(at.parameters()), allow_unused=True)):
                    if g is not None:
                        sums[place] = g if sums[place] is None else sums[place] + g
            own.append(sums)
        # What failed before the boundary is in the table: no rank goes on from an update that will not be made.
        held = [(rank, taken[rank] + index) for rank in ranks for index in range(counts[rank] - 1)]
        is_told = any(one in plan.breaking for one in held)
        weights = [sum(plan.weight(rank, taken[rank] + index) for index in range(counts[rank])) for rank in ranks]
        travelling = []
        for gradients in zip(*own):
            used = any(g is not None for g in gradients) and sum(weights)
            travelling.append(mean_over_ranks(plan, gradients, sum(weights), plan.size(window)) if used else None)
        for rank in ranks:
            taken[rank] += counts[rank]
            ahead[rank] = model
            if weights[rank] and is_finite(own[rank]) and not is_told:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    ahead[rank], stepped = copy.deepcopy((model, optimizer))
                step(ahead[rank], stepped, [None if g is None else g / weights[rank] for g in own[rank]])
        if not sum(weights) or is_told or (plan.tail == "drop" and max(counts) < plan.size(window)):
            travelling = None
    if travelling is not None and is_finite(travelling):
        step(model, optimizer, travelling)
        seen.append(parameters_of(model))
    return seen


def state_of(rank: int) -> torch.Tensor:
    """A rank's random state as it begins."""
    return torch.Generator().manual_seed(100 + rank).get_state()


def mean_over_ranks(plan: Plan, gradients, total: float, size: int) -> torch.Tensor:
    """Of each rank's sum, None for nothing, over `total` micro-batches or items."""
    if not plan.compress:
        return sum(g for g in gradients if g is not None) / total
    zeros = torch.zeros_like(next(g for g in gradients if g is not None))
    planned, num_ranks = 1 if plan.sums else size, len(gradients)
    shares = [((zeros if g is None else g) / planned).bfloat16() / num_ranks for g in gradients]
    return sum(shares).double() * (planned * num_ranks / total)


def is_finite(gradients) -> bool:
    return all(bool(torch.isfinite(g).all()) for g in gradients if g is not None)
