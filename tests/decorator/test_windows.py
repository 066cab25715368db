"""Which micro-batches make a window: steps, tails, reset, exceptions, dropped ones."""

from __future__ import annotations

import gc
import warnings

import pytest

from gradsync import GradSyncError, accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.traps import Trap


def test_steps_may_be_a_function_of_the_windows_number():
    asked = []

    def steps(window):
        asked.append(window)
        return 1 + window

    step = accumulating(steps=steps)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in range(6):
        step(model, optimizer, micro_batch(0, i))
    expected, _ = train(small_model(), [[(0, 0)], [(0, 1), (0, 2)], [(0, 3), (0, 4), (0, 5)]], window_mean)
    assert_equal_updates(optimizer.seen, expected)
    assert asked == [0, 1, 2]


def test_steps_may_be_a_function_without_a_signature():
    """One of C may have none, such as that which returns the items of a list."""
    step = accumulating(steps=[2, 1, 3].__getitem__)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in range(6):
        step(model, optimizer, micro_batch(0, i))
    expected, _ = train(small_model(), [[(0, 0), (0, 1)], [(0, 2)], [(0, 3), (0, 4), (0, 5)]], window_mean)
    assert_equal_updates(optimizer.seen, expected)


def over(step, model, optimizer, data: list, flushes: bool) -> None:
    for x in step.over(data):
        step(model, optimizer, x)


def flush(step, model, optimizer, data: list, flushes: bool) -> None:
    for x in data:
        step(model, optimizer, x)
    if flushes:
        step.flush()


@pytest.mark.parametrize(("tail", "flushed", "windows", "skipped"), [
    ("step", {0, 1}, [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]], 0),
    ("drop", {0, 1}, [[0, 1, 2, 3], [6, 7, 8, 9]], 2),
    ("carry", {1}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], 0),
])  # fmt: skip
@pytest.mark.parametrize("loop", [over, flush])
def test_tails(tail, flushed, windows, skipped, loop):
    step = accumulating(steps=4, tail=tail)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    for epoch in range(2):
        loop(step, model, optimizer, [micro_batch(0, 6 * epoch + i) for i in range(6)], epoch in flushed)
    expected, _ = train(small_model(), [[(0, i) for i in w] for w in windows], window_mean)
    assert_equal_updates(optimizer.seen, expected)
    assert all(p.grad is None for p in model.parameters())
    assert step.progress.skipped == skipped


def test_reset_discards_what_is_open():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 9))
    step.reset()
    assert all(p.grad is None for p in model.parameters())
    for i in range(2):
        step(model, optimizer, micro_batch(0, i))
    assert_equal_updates(optimizer.seen, train(small_model(), cut([2], 2), window_mean)[0])


def test_an_exception_discards_the_window_and_goes_on():
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x) / (0 if x is None else 1))
    model = small_model()
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 9))
    with pytest.raises(TypeError):
        step(model, optimizer, None)
    assert all(p.grad is None for p in model.parameters()) and step.progress.index == 0
    for i in range(3):
        step(model, optimizer, micro_batch(0, i))
    assert_equal_updates(optimizer.seen, train(small_model(), cut([3], 3), window_mean)[0])


class Bad(Exception):
    pass


def test_misuse_that_comes_out_of_a_backward_is_not_skipped():
    """Also where a type in `skip` is a base of its class."""
    model = small_model()
    optimizer = Recorder(model.parameters())

    @accumulating(steps=2, skip=RuntimeError)
    def step(model, optimizer, error):
        return mean_loss(model, Trap.apply(micro_batch(0, 0).requires_grad_(), error))

    assert step(model, optimizer, RuntimeError("a bad batch")) is None and step.progress.dropped == 1
    step.reset()
    with pytest.raises(GradSyncError, match="misused"):
        step(model, optimizer, GradSyncError("misused"))


@pytest.mark.parametrize("bad", [{1}, {3}, {0, 3}, {0, 1, 2, 3}])
def test_skip_drops_one_micro_batch_and_keeps_the_mean_exact(bad):
    @accumulating(steps=4, skip=Bad)
    def step(model, optimizer, i):
        if i in bad:
            raise Bad
        return mean_loss(model, micro_batch(0, i))

    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in range(4):
        assert (step(model, optimizer, i) is None) == (i in bad)
    good = [[(0, i) for i in range(4) if i not in bad]]
    assert_equal_updates(optimizer.seen, train(small_model(), good if good[0] else [], window_mean)[0])
    assert step.progress.dropped == len(bad) and step.progress.window == 1


def test_the_trainable_parameters_are_read_as_each_window_opens():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 0))
    step(model, optimizer, micro_batch(0, 1))
    assert optimizer.seen[0][0] is None
    model[0].requires_grad_(True)
    step(model, optimizer, micro_batch(0, 0))
    step(model, optimizer, micro_batch(0, 1))
    assert optimizer.seen[1][0] is not None
    step(model, optimizer, micro_batch(0, 0))
    model[0].requires_grad_(False)
    with pytest.raises(GradSyncError, match="must stay the same within a window"):
        step(model, optimizer, micro_batch(0, 1))


def test_a_window_left_open_is_warned_about_when_its_function_ends():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 0))
    with pytest.warns(RuntimeWarning, match=r"1 of 2 micro-batches .*\.over\(\.\.\.\).*\.flush\(\)"):
        del step
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = accumulating(steps=1)(lambda model, optimizer, x: mean_loss(model, x))
        optimizer.zero_grad()
        step(model, optimizer, micro_batch(0, 0))
        del step
        gc.collect()
