"""`accumulating(..., fit=True)` on one rank, against the same step with the memory."""

import gc
import logging
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradsync
from gradsync import GradSyncError
from gradsync.functional._fit import in_parts
from gradsync.parts import Sizes
from tests.parts.cases_decorator import LR, WINDOW, Fails, compare, train, truth
from tests.parts.limited import Net, assert_same, batch, gradients, mean_loss, sum_loss

WINDOWS = [[(0, i) for i in range(WINDOW)], [(0, WINDOW + i) for i in range(WINDOW)]]


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """A collection for each failure is what takes the time here; `test_memory.py` has it."""
    monkeypatch.setattr("gradsync.parts.halving.free", lambda: None)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("function", [mean_loss, sum_loss])
def test_every_limit(function, where):
    """Updates, the loss that comes back and `progress` are those of a rank with the memory."""
    expected = truth(WINDOWS, function)
    _, whole = train("bare", where, [6], 2, function)
    for limit in range(1, 7):
        states, progress = train("bare", where, [limit], 2, function)
        compare(states, expected)
        torch.testing.assert_close(progress.loss, whole.loss)
        assert progress.count == whole.count
        assert progress.rows <= limit and (progress.parts == 1) == (limit == 6)


class Operations(TorchDispatchMode):
    """Notes every operation of torch's, forward, backward and beside them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_what_fits_costs_nothing():
    """The same operations, and the same numbers to the bit, as without `fit`; nothing is collected."""
    results = []
    for fit in (False, True):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)

        @gradsync.accumulating(2, fit=fit)
        def step(model, optimizer, x, y):
            return mean_loss(model, x, y)

        with Operations() as operations, pytest.MonkeyPatch.context() as patch:
            patch.setattr("gradsync.parts.halving.free", None)
            for index in range(4):
                step(model, optimizer, *batch(6, seed=index))
        assert (step.progress.parts, step.progress.rows) == (1, 6 if fit else None)
        results.append((operations.names, [p.detach().clone() for p in model.parameters()]))
    assert sorted(results[0][0]) == sorted(results[1][0])
    assert_same(results[0][1], results[1][1], 0.0)


def test_a_real_scaler():
    """Each part is scaled by the window's scale, and unscaled once; an update that overflows is skipped."""
    results = []
    for limit in (6, 2):
        model = Net(dtype=torch.float32)
        model.limit, model.where = limit, "backward"
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)

        @gradsync.accumulating(2, fit=True, clip_norm=0.05)
        def step(model, optimizer, scaler, x, y):
            return mean_loss(model, x, y)

        norms = []
        for index in range(6):
            x, y = batch(6, seed=index, dtype=torch.float32)
            step(model, optimizer, scaler, x, y * (1e37 if index == 2 else 1))
            norms.append(step.progress.grad_norm)
        assert step.progress.updates == 2 and scaler.get_scale() == 2.0**11
        results.append(([p.detach().clone() for p in model.parameters()], norms[-1]))
    assert_same(results[0][0], results[1][0], 1e-5)
    torch.testing.assert_close(results[0][1], results[1][1])


def test_dropout_repeats():
    """Random state is put back: a call that failed draws what one draws that begins with the parts that fit."""
    results = []
    for tried_first in (False, True):
        model = Net()
        model.dropout, model.limit = 0.5, 3
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)

        @gradsync.accumulating(1, fit=True)
        def step(model, optimizer, x, y):
            return mean_loss(model, x, y)

        if not tried_first:
            step(model, optimizer, *(0 * one for one in batch(6)))
            model.load_state_dict(Net().state_dict())
        torch.manual_seed(5)
        step(model, optimizer, *batch(6))
        results.append([p.detach().clone() for p in model.parameters()])
    assert_same(*results, 0.0)


def test_errors_in_parts():
    """One that is not about memory goes on and discards the window; with `skip`, it does so after the first part only."""
    for part, expected in ((1, [WINDOWS[0][:1] + WINDOWS[0][2:], WINDOWS[1]]), (2, [WINDOWS[1]])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sizes, "parts", lambda *_: 2)
            patch.setattr(Sizes, "__bool__", lambda _: True)
            states, progress = train("bare", "forward", [3], 2, fails=Fails(1, part), skip=ValueError)
            compare(states, truth(expected))
            assert (progress.dropped, progress.skipped) == (1, part - 1)
            with pytest.raises(ValueError, match="not about memory"):
                train("bare", "forward", [3], 2, fails=Fails(1, part))


def test_below_one_row():
    """The allocator's error goes on, the window is discarded, and the next call begins anew."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    @gradsync.accumulating(2, fit=True)
    def step(model, optimizer, x, y):
        return mean_loss(model, x, y)

    step(model, optimizer, *batch(6))
    model.limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        step(model, optimizer, *batch(6))
    assert gradients(model) == [None] * 8 and step.progress.index == 0
    model.limit = 6
    step(model, optimizer, *batch(6))
    assert step.progress.index == 1
    step.reset()


@pytest.mark.parametrize("function", [mean_loss, sum_loss])
def test_no_memory_for_the_scalar_that_backward_begins_with(function, monkeypatch):
    """That is before the one backward of a call is spent: what fits runs in parts, and all parts count."""
    plain = in_parts.weigh

    def weigh(window, loss, scaler=None):
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("not even for that")
        return plain(window, loss, scaler)

    def noted(model, x, y):
        sizes.append(len(x))
        return function(model, x, y)

    sizes = []
    monkeypatch.setattr(in_parts, "weigh", weigh)
    states, progress = train("bare", "forward", [6], 2, noted)
    compare(states, truth(WINDOWS, function))
    assert progress.rows <= 2


def test_a_method_and_a_function_that_cuts():
    """The cut gets a method's arguments without the instance; what comes back has the loss of the whole."""

    def cut(args, kwargs, parts):
        (rows,) = args
        step = -(-len(rows) // parts)
        return [((rows[at : at + step],), kwargs) for at in range(0, len(rows), step)]

    class Trainer:
        def __init__(self):
            self.model = Net()
            self.model.limit = 2
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

        @gradsync.accumulating(
            WINDOW, fit=cut, model=lambda self, *_: self.model, optimizer=lambda self, *_: self.optimizer
        )
        def step(self, rows):
            x, y = (torch.stack(one) for one in zip(*rows))
            return {"loss": sum_loss(self.model, x, y), "rows": len(rows)}

    trainer = Trainer()
    for index in range(WINDOW):
        data = batch(6, seed=10 * index)
        returned = trainer.step(list(zip(*data)))
        assert returned["loss"].count == 30 and trainer.step.progress.parts in (3, 4)
    compare([[p.detach() for p in trainer.model.parameters()]], truth(WINDOWS[:1], sum_loss))


def test_wrong_arguments():
    """Said at decoration, or as the first window opens."""
    with pytest.raises(TypeError, match="fit must be True, False or a function"):
        gradsync.accumulating(2, fit=4)
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    @gradsync.accumulating(2, fit=True)
    def step(model, optimizer, *data):
        return mean_loss(model, *data)

    with pytest.raises(GradSyncError, match="1 is a BatchNorm1d in training"):
        step(model, optimizer, *batch(4, dtype=torch.float32))
    model.eval()
    step(model, optimizer, *batch(4, dtype=torch.float32))
    with pytest.raises(GradSyncError, match="zero_grad"):
        optimizer.zero_grad()
        step(model, optimizer, *batch(4, dtype=torch.float32))
    assert step.progress.index == 0


def test_a_thousand_failures_leave_nothing(caplog):
    """Neither tensors nor hooks, states or handles are left; dropping model and optimizer frees both, cycles included."""
    caplog.set_level(logging.ERROR, "gradsync")  # the records themselves are kept by pytest
    model = Net(depth=2, at=1)  # small: it is run two thousand times
    model.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    @gradsync.accumulating(2, fit=True)
    def step(model, optimizer, x, y):
        return mean_loss(model, x, y)

    def some(number, data=batch(4)):
        failures = 0
        while failures < number:
            model.where = ("forward", "backward")[failures % 2]
            step(model, optimizer, *data)
            failures += len(model.log)
            model.log.clear()
        while step.progress.index:
            step(model, optimizer, *data)
        model.log.clear()

    def count():
        gc.collect()
        objects = gc.get_objects()
        return len(objects), sum(issubclass(type(one), torch.Tensor) for one in objects)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sizes, "__bool__", lambda _: False)  # none is remembered
        model.limit = 1
        some(20)
        before = count()
        some(1000)
        after = count()
    assert after[1] <= before[1] and after[0] <= before[0] + 50
    ends = [weakref.ref(one) for one in (model, optimizer, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert not any(end() is not None for end in ends)


def test_no_memory_for_the_exchange_is_no_reason_to_cut(monkeypatch):
    """The ranks would begin it a second time."""

    def begin(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. (not really)")

    monkeypatch.setattr("gradsync.functional.Run.begin", begin)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync.accumulating(steps=1, fit=True)(lambda model, optimizer, x, y: mean_loss(model, x, y))
    with pytest.raises(GradSyncError, match="before a window's gradients synchronise, but there was no memory left"):
        step(model, optimizer, *batch(4))
