"""A user's hooks on parameters run once for each gradient of this rank's micro-batches: no None, no zeros, no more."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from tests.support.models import small_model
from tests.support.reference import cut, micro_batch
from tests.support.verdicts import FullRecorder, compare, exact, items_of_rank, on_engine, verdict, verdicts

LENGTHS = {1: [5], 2: [5, 2], 3: [4, 0, 2]}
EVEN = {1: [4], 2: [4, 4], 3: [4, 4, 4]}
ENGINES = ["bare", "ddp", "find_unused", "views"]
HOMES = [*((one, 2) for one in ENGINES), ("bare", 1), ("bare", 3), ("find_unused", 3)]


class Sometimes(nn.Module):
    """A model with a parameter that nobody uses, and a layer that some micro-batches go through."""

    def __init__(self, phase: bool = False, unused: bool = False, used_by_some: bool = False) -> None:
        super().__init__()
        self.used_by_some = used_by_some
        if phase:  # complex, and the first of the parameters: nothing real can be asked of it
            self.phase = nn.Parameter(torch.tensor([0.5 + 0.25j, -1.0 + 2.0j, 0.75 - 0.5j], dtype=torch.complex128))
        self.body = small_model()
        if unused:
            self.extra = nn.Linear(3, 2).double()
            with torch.no_grad():
                self.extra.weight.copy_(torch.arange(6.0).reshape(2, 3) / 5)
                self.extra.bias.zero_()
            self.nobody = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def uses(self, rank: int, index: int) -> bool:
        return self.used_by_some and (rank + index) % 3 == 0

    def forward(self, rank, index, x):
        if hasattr(self, "phase"):
            x = torch.view_as_real(x * self.phase).sum(-1)
        y = self.body(x)
        if self.uses(rank, index):
            y = y + self.extra(x)
        return y.square().mean() + y.sum() * 0.1


KINDS = {
    "all used": {}, "unused": {"unused": True}, "used by some": {"unused": True, "used_by_some": True},
    "complex": {"phase": True},
}  # fmt: skip


class Watch:
    """The user's hooks: a mask on the gradient, and a count of what came."""

    def __init__(self, model: Sometimes) -> None:
        self.told: dict[str, list[str]] = {}
        for name, parameter in model.named_parameters():
            self.told[name] = []
            parameter.register_hook(self.hook(name, parameter))
            parameter.register_post_accumulate_grad_hook(self.after(name))

    def hook(self, name, parameter):
        def hook(grad):
            kind = "None" if grad is None else "zeros" if not grad.any() else "hook"
            self.told[name].append(kind)
            return None if grad is None else grad * mask(parameter)

        return hook

    def after(self, name):
        return lambda parameter: self.told[name].append("None after" if parameter.grad is None else "after")


def mask(parameter):
    """Rows that are not trained, as of an embedding whose old tokens stay."""
    rows = torch.ones(parameter.shape[0], dtype=torch.float64)
    rows[0] = 0.0
    return rows.reshape(-1, *[1] * (parameter.dim() - 1))


def masked_reference(kind: dict, lengths, steps: int):
    def whole(model, window):
        return sum(model(r, i, micro_batch(r, i)) for r, i in window) / len(window)

    model, seen = Sometimes(**kind), []
    for window in cut(lengths, steps):
        grads = torch.autograd.grad(whole(model, window), list(model.parameters()), allow_unused=True)
        grads = [None if g is None else g * mask(p) for g, p in zip(grads, model.parameters(), strict=True)]
        seen.append(grads)
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                if g is not None:
                    p -= 0.1 * g
    return seen


# -- loops ----------------------------------------------------------------------------------------------------------


def calls(steps: int, home, optimizer, data, around=lambda step, data: data) -> None:
    @gradsync.accumulating(steps, model=home, optimizer=optimizer)  # named, for a rank without items
    def step(home, optimizer, i, x):
        return home(dist.get_rank(), i, x)

    for i, x in around(step, data):
        step(home, optimizer, i, x)
    step.flush()


def over(steps: int, home, optimizer, data) -> None:
    calls(steps, home, optimizer, data, lambda step, data: step.over(data))


def over_unsized(steps: int, home, optimizer, data) -> None:
    calls(steps, home, optimizer, data, lambda step, data: step.over(iter(data)))


def sync_every(steps: int, home, optimizer, data, backward=lambda micro, loss: micro.backward(loss)) -> None:
    for micro, (i, x) in gradsync.sync_every(home, steps, data):
        backward(micro, home(dist.get_rank(), i, x))
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()


def sync_every_plain(steps: int, home, optimizer, data) -> None:
    sync_every(steps, home, optimizer, data, lambda micro, loss: (loss / micro.size).backward())


def sync_gradients(steps: int, home, optimizer, data) -> None:
    if isinstance(home, Sometimes):  # a plain DDP promises that every parameter is used
        home = gradsync.ddp(home, find_unused_parameters=hasattr(home, "extra"))
    for i, x in data:
        with gradsync.no_sync(home):
            (home(dist.get_rank(), i, x) / steps).backward()
        if i % steps == steps - 1:
            gradsync.sync_gradients(home)
            optimizer.step()
            optimizer.zero_grad()


def hooked(engine: str, kind: dict, loop, lengths: list[int], steps: int):
    rank = dist.get_rank()
    model = Sometimes(**kind)
    home = on_engine(model, engine)
    optimizer = FullRecorder(model.parameters())
    watch = Watch(model)

    def run():
        data = list(enumerate(items_of_rank(lengths)))
        loop(steps, home, optimizer, data)
        for name, told in watch.told.items():
            if name.startswith("extra"):
                num = sum(model.uses(rank, i) for i, _ in data)
            else:
                num = 0 if name == "nobody" else len(data)
            assert told.count("hook") == num and told.count("after") == num, f"{name}: {told}, where {num} came"
            assert len(told) == 2 * num, f"{name}: {told}, where {num} came"
        compare(optimizer.seen, masked_reference(kind, lengths, steps))

    return verdict(run)


LOOPS = {
    "over": (over, LENGTHS, 2),
    "unsized": (over_unsized, LENGTHS, 2),
    "calls": (calls, EVEN, 2),
    # After as many closed windows each, one rank has nothing in the open one.
    "flush": (calls, {1: [5], 2: [5, 4], 3: [5, 4, 6]}, 4),
    "sync_every": (sync_every, EVEN, 2),
    "sync_every, uneven": (sync_every, {**LENGTHS, 3: [4, 1, 2]}, 2),  # it needs an item on each rank
    "sync_every, plain": (sync_every_plain, EVEN, 2),
    "sync_gradients": (sync_gradients, EVEN, 2),
}


@pytest.mark.parametrize(("loop", "lengths", "steps"), LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_hooks_on_parameters(ranks, engine, size, kind, loop, lengths, steps):
    """Each hook runs once for each gradient of this rank's micro-batches; what it makes of it is in the mean.

    A plain DDP promises that every parameter is used, so what is not used is asked of the others. With a communication
    of one's own (`sync_gradients`) no gradient of a micro-batch comes, and no hook runs.
    """
    if "unused" in kind and engine in {"ddp", "views"}:
        pytest.skip("DDP without find_unused_parameters asks that each parameter be used")
    exact(verdicts(ranks(size), hooked, engine, kind, loop, lengths[size], steps))


def removed_and_kept(engine: str):
    """The handles that the user holds still work after windows that were uneven."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Sometimes()
    home = on_engine(model, engine)
    optimizer = FullRecorder(model.parameters())
    calls = {"removed": 0, "kept": 0}
    parameter = next(model.parameters())

    def count(name):
        def hook(*_):
            calls[name] += 1

        return hook

    handles = [parameter.register_hook(count("removed")), parameter.register_post_accumulate_grad_hook(count("removed"))]
    parameter.register_hook(count("kept"))
    step = gradsync.accumulating(2, model=home, optimizer=optimizer)(lambda model, optimizer, i, x: model(rank, i, x))

    def epoch():
        for i, x in step.over(list(enumerate(items_of_rank(LENGTHS[size])))):
            step(home, optimizer, i, x)

    def run():
        epoch()
        for handle in handles:
            handle.remove()
        epoch()
        num = LENGTHS[size][rank]
        assert calls == {"removed": 2 * num, "kept": 2 * num}, f"{calls}, where {num} came twice"

    return verdict(run)


@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_handles_still_work(ranks, engine, size):
    exact(verdicts(ranks(size), removed_and_kept, engine))


def embedding(engine: str):
    """Rows of an embedding are masked, on ranks of different lengths: the case that people bring."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def build():
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 2)).double()

    words = lambda r, i: (torch.arange(4) + r + 2 * i) % 6  # noqa: E731
    keep = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    model = build()
    model[0].weight.register_hook(lambda grad: grad * keep)
    home = on_engine(model, engine)
    optimizer = FullRecorder(model.parameters())
    step = gradsync.accumulating(2, model=home, optimizer=optimizer)(lambda model, optimizer, x: model(x).square().mean())

    def run():
        for i in step.over(range(LENGTHS[size][rank])):
            step(home, optimizer, words(rank, i))

        def whole(model, window):
            return sum(model(words(r, i)).square().mean() for r, i in window) / len(window)

        twin = build()
        twin[0].weight.register_hook(lambda grad: grad * keep)
        its = FullRecorder(twin.parameters())
        for window in cut(LENGTHS[size], 2):
            whole(twin, window).backward()
            its.step()
            its.zero_grad()
        compare(optimizer.seen, its.seen)

    return verdict(run)


@pytest.mark.parametrize(("engine", "size"), HOMES)
def test_masked_rows_of_an_embedding(ranks, engine, size):
    exact(verdicts(ranks(size), embedding, engine))
