"""The decorated function and its model stay what they were: name, copies, pickles, memory."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import types
import warnings
import weakref
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gradsync
from gradsync import accumulating
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import mean_loss, micro_batch


@accumulating(steps=2)
def module_level_step(model, optimizer, x):
    """Docstring."""
    return mean_loss(model, x)


class Trainer:
    def __init__(self):
        self.model = small_model()
        self.optimizer = Recorder(self.model.parameters())

    @accumulating(steps=2, model=lambda self, *_: self.model, optimizer=lambda self, *_: self.optimizer)
    def train_step(self, x):
        """A method."""
        return mean_loss(self.model, x)


def test_the_decorated_function_keeps_its_name_doc_and_type():
    import inspect

    assert module_level_step.__name__ == "module_level_step" and module_level_step.__doc__ == "Docstring."
    assert list(inspect.signature(module_level_step).parameters) == ["model", "optimizer", "x"]
    assert isinstance(module_level_step, types.FunctionType)
    assert list(inspect.signature(Trainer().train_step).parameters) == ["x"]


def test_copying_and_pickling_are_those_of_a_function():
    assert copy.copy(module_level_step) is module_level_step
    assert copy.deepcopy({"step": module_level_step})["step"] is module_level_step
    assert pickle.loads(pickle.dumps(module_level_step)) is module_level_step
    trainer = Trainer()
    trainer.train_step(micro_batch(0, 0))
    twin = copy.deepcopy(trainer)
    assert twin.train_step.progress.micro_steps == 0
    trainer.train_step.reset()
    other = copy.deepcopy(trainer.train_step)
    assert type(other.__self__) is Trainer and other.__self__ is not trainer and other.__self__.model is not trainer.model
    bound = pickle.loads(pickle.dumps(trainer.train_step))
    assert bound.__name__ == "train_step" and type(bound.__self__) is Trainer
    for of_class in (pickle.loads(pickle.dumps(Trainer.train_step)), copy.deepcopy(Trainer.train_step)):
        other = Trainer()
        of_class(other, micro_batch(0, 0))
        assert other.train_step.progress.index == 1
        other.train_step.reset()


class OwnLoss:
    """As in the README: a bound method is decorated, and models are named."""

    def __init__(self, acc: int) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.told = []
        self.step = gradsync.accumulating(acc, model=self.model, optimizer=self.optimizer, on_update=self.tell)(self.loss)

    def loss(self, x):
        return self.model(x).square().mean()

    def tell(self, progress):
        self.told.append(progress.updates)


def test_a_copy_of_what_has_decorated_its_method_trains_its_own_model():
    one = OwnLoss(2)
    one.step(torch.ones(2, 3))
    two = copy.deepcopy(one)
    before = [copy.deepcopy(trainer.model.state_dict()) for trainer in (one, two)]
    for _ in range(2):
        two.step(torch.ones(2, 3))
    moved = [
        any(not torch.equal(value, state[name]) for name, value in trainer.model.state_dict().items())
        for trainer, state in zip((one, two), before, strict=True)
    ]
    assert moved == [False, True]
    assert (one.told, two.told) == ([], [1])
    assert (one.step.progress.index, two.step.progress.micro_steps) == (1, 2)
    one.step.reset()


def named_without_a_name(function) -> int:
    """What has no name of its own has the same name on all ranks."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync.accumulating(2)(function)
    for x in step.over(torch.ones(4, 2, 3)):
        step(model, optimizer, x)
    return step.progress.updates


def weighed_loss(weight, model, optimizer, x):
    return model(x).square().mean() * weight


class WeighedLoss:
    def __call__(self, model, optimizer, x):
        return weighed_loss(2.0, model, optimizer, x)


@pytest.mark.parametrize("function", [functools.partial(weighed_loss, 0.5), WeighedLoss()], ids=["partial", "object"])
def test_a_partial_and_a_callable_object_on_two_ranks(ranks, function):
    assert ranks(2).run(named_without_a_name, function) == [2, 2]


def test_the_model_can_be_copied_and_pickled_at_any_time():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    attributes, keys = set(vars(model)), list(model.state_dict())
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 0))
    copy.deepcopy(model), pickle.dumps(model), copy.deepcopy(optimizer.state_dict())
    assert set(vars(model)) == attributes and list(model.state_dict()) == keys
    step.reset()


@contextmanager
def nothing_collected():
    """What is freed in here is freed by itself."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_dropping_model_and_optimizer_frees_everything():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4):
        step(model, optimizer, micro_batch(0, i))
    refs = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
    with nothing_collected():
        del model, optimizer
        assert [ref() for ref in refs] == [None, None, None]


class Fails(torch.autograd.Function):
    """Its backward fails. The exception is new each time: one that a graph refers to is a cycle by itself."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


@pytest.mark.parametrize("fit", [False, True])
@pytest.mark.parametrize("skip", [ZeroDivisionError, ()])
@pytest.mark.parametrize("fails", [0, 1])
def test_an_exception_in_a_backward_keeps_nothing(fails, skip, fit):
    """A frame that is in the traceback of an exception must not refer to it: that is a cycle, with the model in it."""

    def run() -> list[weakref.ref]:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @accumulating(steps=2, skip=skip, fit=fit)
        def step(model, optimizer, x, fail):
            return mean_loss(model, (Fails.apply if fail else torch.clone)(x.requires_grad_()))

        for i in range(4):
            with suppress(ZeroDivisionError):
                step(model, optimizer, micro_batch(0, i), i == 2 + fails)
        step.reset()
        return [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]

    run()  # what torch imports at its first exception may keep some frames
    with nothing_collected():
        assert [ref() for ref in run()] == [None, None, None]


def test_a_function_whose_on_update_refers_to_it_is_freed():
    """A trainer that decorates its own method, with keywords that refer to itself, is a cycle, and no leak."""

    class Trainer:
        def __init__(self):
            self.model = small_model()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.step = accumulating(
                lambda window: 2 if self.model is not None else 1,
                model=lambda *_: self.model, optimizer=lambda *_: self.optimizer, on_update=self.note,
            )(self.loss)  # fmt: skip

        def loss(self, x):
            return mean_loss(self.model, x)

        def note(self, progress):
            self.progress = progress, self.step

    trainer = Trainer()
    for i in range(3):
        trainer.step(micro_batch(0, i))
    refs = [weakref.ref(trainer), weakref.ref(trainer.model)]
    del trainer
    with pytest.warns(RuntimeWarning, match="ended with a window open: 1 of 2"):
        gc.collect()
    assert all(ref() is None for ref in refs)


@pytest.mark.parametrize(("error", "notebook", "warns"), [(False, False, 1), (True, False, 0), (True, True, 1)])
def test_a_window_that_is_left_open_is_warned_of_unless_an_error_ended_the_program(monkeypatch, error, notebook, warns):
    """In a notebook an error ends its cell, and what was left open in a later one is still worth a word."""
    gc.collect()
    if error:
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    if notebook:
        monkeypatch.setattr(sys, "ps1", "In: ", raising=False)
    step, model = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x)), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, micro_batch(0, 0))
    with warnings.catch_warnings(record=True) as came:
        warnings.simplefilter("always")
        del step
        gc.collect()
    assert ["window open" in str(one.message) for one in came] == [True] * warns


class Kinds:
    """Methods that are bound to a class or to nothing, decorated on either side."""

    @accumulating(steps=2)
    @classmethod
    def class_inside(cls, model, optimizer, x):
        return mean_loss(model, x)

    @classmethod
    @accumulating(steps=2)
    def class_outside(cls, model, optimizer, x):
        return mean_loss(model, x)

    @accumulating(steps=2)
    @staticmethod
    def static_inside(model, optimizer, x):
        return mean_loss(model, x)

    @staticmethod
    @accumulating(steps=2)
    def static_outside(model, optimizer, x):
        return mean_loss(model, x)


@pytest.mark.parametrize("home", [Kinds, Kinds()], ids=["class", "instance"])
@pytest.mark.parametrize("name", ["class_inside", "class_outside", "static_inside", "static_outside"])
def test_calls_and_loops_of_a_classmethod_and_of_a_staticmethod_find_each_other(name, home):
    step, model = getattr(home, name), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in getattr(home, name).over(range(3)):
        step(model, optimizer, micro_batch(0, i))
    assert (step.progress.micro_steps, step.progress.updates, step.progress.index) == (3, 2, 0)


@pytest.mark.parametrize("calls", [0, 2])
def test_an_instance_is_freed_after_a_loop_with_items_that_had_no_call(calls):
    trainer = Trainer()
    for i in trainer.train_step.over(range(3)):
        if i < calls:
            trainer.train_step(micro_batch(0, i))
    ref = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert ref() is None


def test_no_allocation_grows_with_the_number_of_windows():
    step = accumulating(steps=4)(lambda model, optimizer, x: model(x).sum())
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(1, 1)
    for _ in range(100):
        step(model, optimizer, x)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(2000):
        step(model, optimizer, x)
    gc.collect()
    assert abs(len(gc.get_objects()) - before) < 20


def three_calls(home, model):
    """Copies and pickles of the model never see the DDP behind it."""
    attributes, keys = set(vars(model)), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    for i in range(3):
        step(home, optimizer, micro_batch(dist.get_rank(), i))
    assert set(vars(model)) == attributes and list(model.state_dict()) == keys
    return step, optimizer


def bare_freed() -> None:
    """The DDP behind a model dies with it."""
    model = small_model()
    step, optimizer = three_calls(model, model)
    twin = copy.deepcopy(model)
    assert gradsync.engines.behind(twin) is None and gradsync.engines.behind(model) is not None
    pickle.loads(pickle.dumps(model))
    step.flush()
    refs = [weakref.ref(one) for one in (gradsync.engines.behind(model), model, model[0].weight, optimizer)]
    with nothing_collected():
        del model, optimizer
        assert all(ref() is None for ref in refs), refs


def ddp_freed() -> None:
    model = small_model()
    home = DDP(model)
    step, optimizer = three_calls(home, model)
    step.flush()
    refs = [weakref.ref(home), weakref.ref(optimizer)]
    with nothing_collected():
        del model, home, optimizer
        assert all(ref() is None for ref in refs), refs


@pytest.mark.parametrize("case", [bare_freed, ddp_freed])
def test_dropping_model_and_optimizer_frees_the_engine(ranks, case):
    ranks(2).run(case)


def test_loops_and_functions_may_come_and_go_while_an_optimizer_steps():
    """As another thread or the garbage collector has it: torch's table of hooks must not change in the meantime."""
    model = torch.nn.Linear(2, 2)
    optimizer, elsewhere = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, torch.nn.Linear(2, 2)))

    def meanwhile(*_):
        accumulating(steps=2)(lambda model, optimizer, x: model(x).sum())(model, optimizer, torch.ones(1, 2))
        model.zero_grad()
        gc.collect()  # the function is gone, and its window with it
        for step, x in gradsync.sync_every(model, 1, torch.ones(2, 1, 2)):
            step.backward(model(x).sum())

    for _ in gradsync.sync_every(model, 1, torch.ones(0, 1, 2)):
        pass
    accumulating(steps=1)(lambda model, optimizer, x: model(x).sum())(model, optimizer, torch.ones(1, 2))
    handles = [register_optimizer_step_pre_hook(hook) for hook in (meanwhile, lambda *_: None)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the window that was left open
            elsewhere.step()
    finally:
        for handle in handles:
            handle.remove()
