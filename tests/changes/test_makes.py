"""Schedulers of makes that nobody has seen, containers of every kind, trainers with a `step`: taken, or an error."""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.amp import GradScaler
from torch.optim.lr_scheduler import ChainedScheduler, StepLR

from gradsync import GradSyncError, accumulating
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch


def halve(*optimizers) -> None:
    for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        group["lr"] *= 0.5


class Slotted:
    __slots__ = ("optimizer",)

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        halve(self.optimizer)


class Private:
    def __init__(self, optimizer) -> None:
        self._opt = optimizer

    def step(self) -> None:
        halve(self._opt)


class Several:
    def __init__(self, optimizer) -> None:
        self.by_name = {"all": [optimizer]}

    def step(self) -> None:
        halve(*self.by_name["all"])


class Around:
    """Around one of torch's."""

    def __init__(self, optimizer) -> None:
        self.inner = StepLR(optimizer, 1, 0.5)

    def step(self, *, metrics=None) -> None:
        self.inner.step()


@dataclass
class Data:
    optimizer: Any
    inner: Any = None

    def step(self) -> None:
        halve(self.optimizer)


class Warmup:
    """The scheduler of "Attention is all you need", as it is written everywhere: it steps the optimizer as well."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        halve(self.optimizer)
        self.optimizer.step()


MAKES = {
    "slotted": Slotted, "private": Private, "several": Several, "around": Around, "data": Data,
    "data around one": lambda o: Data(o, StepLR(o, 1, 0.1)),
    "namespace": lambda o: SimpleNamespace(step=lambda: halve(o), optimizer=o),
    "chained": lambda o: ChainedScheduler([StepLR(o, 1, 0.5)]),
}  # fmt: skip


def trained(*more, **options):
    """A model and its optimizer after two windows of two, of a function that `more(optimizer)` are arguments of."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = accumulating(steps=2, **{key: make(optimizer) for key, make in options.items()})(
        lambda model, optimizer, *rest: mean_loss(model, rest[-1])
    )
    others = [make(optimizer) for make in more]
    for i in range(4):
        step(model, optimizer, *others, micro_batch(0, i))
    return model, optimizer


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_scheduler_of_any_make_is_taken(make):
    for _, optimizer in (trained(make), trained(scheduler=make)):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_a_named_scheduler_need_not_show_what_it_moves():
    class Hidden:
        def __init__(self, optimizer) -> None:
            self.step = lambda: halve(optimizer)

    assert trained(scheduler=Hidden)[1].param_groups[0]["lr"] == pytest.approx(0.025)


def test_a_scheduler_that_steps_the_optimizer_too_is_an_error():
    """Each update would be two."""
    with pytest.raises(GradSyncError, match="Warmup steps the optimizer once more"):
        trained(Warmup)
    by_hand = trained()[0]
    assert torch.isfinite(by_hand[0].weight).all()


@pytest.mark.parametrize("make", [StepLR, lambda o, *_: Slotted(o)])
def test_a_scheduler_of_an_optimizer_that_was_made_anew_is_an_error(make):
    """It would go on moving the old one."""
    old = torch.optim.SGD(small_model().parameters(), lr=0.1)
    with pytest.raises(GradSyncError, match="moves another SGD"):
        trained(lambda _: make(old, 1))
    assert old.param_groups[0]["lr"] == 0.1


Pair = namedtuple("Pair", "a b")


@dataclass
class State:
    steps: int
    it: Any


CONTAINERS = {
    "dataclass": lambda one: State(1, one), "namedtuple": lambda one: Pair(1, one), "OrderedDict": lambda one: OrderedDict(a=one),
    "defaultdict": lambda one: defaultdict(list, {"a": one}), "deque": lambda one: deque([one]), "UserDict": lambda one: UserDict(a=one),
    "namespace": lambda one: SimpleNamespace(a=[one]), "frozenset": lambda one: frozenset([one]),
    "proxy": lambda one: MappingProxyType({"a": {"b": State(1, (one,))}}),
}  # fmt: skip
HIDDEN = {
    "scheduler": lambda o: StepLR(o, 1, 0.5), "optimizer": lambda o: torch.optim.SGD(small_model().parameters(), lr=0.1),
    "scaler": lambda o: GradScaler("cpu"),
}  # fmt: skip


@pytest.mark.parametrize("hide", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("what", HIDDEN)
def test_a_participant_in_any_container_is_an_error(what, hide):
    with pytest.raises(GradSyncError, match=f"an? {what} .* would be passed over"):
        trained(lambda o: hide(HIDDEN[what](o)))


def test_what_is_left_out_on_purpose_is_left_out():
    """`scheduler=()` says that none takes part: its user steps it, after each epoch."""
    _, optimizer = trained(lambda o: State(1, StepLR(o, 1, 0.5)), scheduler=lambda o: ())
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_container_that_holds_itself_is_data():
    itself: list = [1]
    itself.append(itself)
    trained(lambda _: itself)


class Trainer:
    """With models in a list, optimizers, and a `step`: all that a scheduler has, and none."""

    def __init__(self) -> None:
        self.models = [small_model()]
        self.optimizer = torch.optim.SGD(self.models[0].parameters(), lr=0.1)

    @accumulating(steps=2, model=lambda self, *_: self.models[0], optimizer=lambda self, *_: self.optimizer)
    def step(self, x):
        return mean_loss(self.models[0], x)


class TrainerWithAnother(Trainer):
    @accumulating(steps=2, model=lambda self, *_: self.models[0], optimizer=lambda self, *_: self.optimizer)
    def train(self, x):
        return mean_loss(self.models[0], x)

    def step(self) -> None:
        raise AssertionError("nobody asked for this")


@pytest.mark.parametrize(("trainer", "name"), [(Trainer, "step"), (TrainerWithAnother, "train")])
def test_a_trainer_is_no_scheduler(trainer, name):
    one, (expected, _) = trainer(), trained()
    for i in range(4):
        getattr(one, name)(micro_batch(0, i))
    assert all(map(torch.equal, one.models[0].parameters(), expected.parameters()))


@pytest.mark.parametrize("first", [False, True])
def test_a_scaler_that_comes_or_goes_in_the_middle_of_a_window_is_an_error(first):
    """One half of the window's gradients would be 65536 times the other."""
    model, scaler = small_model(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = accumulating(steps=2)(lambda model, optimizer, x, *_: mean_loss(model, x))
    step(model, optimizer, micro_batch(0, 0), *([scaler] if first else []))
    with pytest.raises(GradSyncError, match="a GradScaler (came|went) in the middle"):
        step(model, optimizer, micro_batch(0, 1), *([] if first else [scaler]))
    step.reset()
    for i in range(2):  # between windows it may, and one that is switched off is none
        step(model, optimizer, micro_batch(0, i), *([GradScaler("cpu", enabled=False)] if i else []))
    assert step.progress.updates == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no exception groups")
def test_misuse_in_a_group_of_exceptions_is_not_skipped():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @accumulating(steps=2, skip=Exception)
    def step(model, optimizer, x):
        raise ExceptionGroup("two", [ValueError("bad record"), ExceptionGroup("one", [GradSyncError("misuse")])])

    with pytest.raises(ExceptionGroup):
        step(model, optimizer, micro_batch(0, 0))
