"""Loops that are left early, through what people put around an iterator: a progress bar, a generator, a variable."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync import GradSyncError
from gradsync._frames import drawn_by, is_left_on_purpose
from tests.loops import ways_to_leave
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch


class Bar:
    """Like tqdm: the generator around an iterable, and an object that keeps it."""

    def __init__(self, iterable):
        self.iterable = iterable

    def __iter__(self):
        iterable = self.iterable
        try:
            yield from iterable
        finally:
            self.iterable = None


def wrapping(iterable):
    for item in iterable:
        yield item


AROUND = {
    "nothing": lambda it: it,
    "map": lambda it: map(lambda item: item, it),
    "expression": lambda it: (item for item in it),
    "generator": wrapping,
    "two": lambda it: wrapping(wrapping(it)),
    "bar": Bar,
}
WAYS = [("break", False), ("break", True), ("return", False), ("return", True), ("raise", False)]


def leave(box: list, each, how: str, at: int, held: bool) -> None:
    """Loop up to the item `at`; `held` says that a variable of this function keeps the iterator."""
    if held:
        iterator = box.pop()
    for number, item in enumerate(iterator if held else box.pop()):
        each(item)
        if number < at:
            continue
        if how == "break":
            break
        if how == "return":
            return
        raise KeyError


def left(around: str, make, each, how: str, at: int, held: bool) -> list[str]:
    """Leave such a loop; the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        box = [AROUND[around](make())]
        try:
            leave(box, each, how, at, held)
        except KeyError:
            assert how == "raise"
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("how", ["break", "return"])
@pytest.mark.parametrize("around", AROUND)
def test_over_says_that_a_window_is_open(around, how, held):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync.accumulating(3)(lambda model, optimizer, x: mean_loss(model, x))
    make = lambda: step.over([micro_batch(0, i) for i in range(9)])  # noqa: E731
    (told,) = left(around, make, lambda x: step(model, optimizer, x), how, 3, held)
    assert "left with a window open: 1 micro-batches" in told
    step.flush()
    assert step.progress.updates == 2


@pytest.mark.parametrize("around", AROUND)
def test_over_says_nothing_beside_an_exception(around):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync.accumulating(3)(lambda model, optimizer, x: mean_loss(model, x))
    make = lambda: step.over([micro_batch(0, i) for i in range(9)])  # noqa: E731
    assert left(around, make, lambda x: step(model, optimizer, x), "raise", 3, held=False) == []
    step.reset()


def test_over_says_that_a_window_is_open_where_what_it_is_zipped_with_ends():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync.accumulating(3)(lambda model, optimizer, x: mean_loss(model, x))
    with pytest.warns(RuntimeWarning, match="left with a window open: 1 micro-batches"):
        for _, x in zip(range(4), step.over([micro_batch(0, i) for i in range(9)])):
            step(model, optimizer, x)
    step.flush()
    assert step.progress.updates == 2


@pytest.mark.parametrize(("how", "held"), WAYS)
@pytest.mark.parametrize("around", AROUND)
def test_gradients_of_half_a_window_are_dropped_or_said(around, how, held):
    """Those of a loop that was left on purpose are its user's; an exception drops them."""
    model = small_model()
    make = lambda: gradsync.sync_every(model, 3, [micro_batch(0, i) for i in range(9)])  # noqa: E731
    each = lambda one: one[0].backward(mean_loss(model, one[1]))  # noqa: E731
    assert left(around, make, each, how, 1, held) == []
    if how == "raise":
        assert all(parameter.grad is None for parameter in model.parameters())
        return
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(GradSyncError, match="left in the middle of a window"):
        for one in make():
            each(one)


def lands(around: str, how: str, held: bool) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync.accumulating(3, overlap=3)(lambda model, optimizer, x: mean_loss(model, x))
    make = lambda: step.over([micro_batch(dist.get_rank(), i) for i in range(9)])  # noqa: E731
    assert left(around, make, lambda x: step(model, optimizer, x), how, 5, held) == []
    assert step.progress.updates == (1 if how == "raise" else 2)
    here = nn.utils.parameters_to_vector(model.parameters())
    sum_of_all = here.detach().clone()
    dist.all_reduce(sum_of_all)
    assert torch.equal(sum_of_all, here * dist.get_world_size()), "provisional parameters were left"
    step.settle()


@pytest.mark.parametrize(("how", "held"), WAYS)
@pytest.mark.parametrize("around", AROUND)
def test_what_travels_lands(ranks, around, how, held):
    """But after an exception, which waits for nothing."""
    ranks(2).run(lands, around, how, held)


@pytest.mark.parametrize("way", ways_to_leave.WAYS, ids=lambda way: way.__name__)
def test_an_exception_is_told_from_a_break(way) -> None:
    """By the instruction at which the loop's frame stands; of other Pythons by `tests.measure.pythons`."""
    told = ways_to_leave.is_taken_for_purpose(way, is_left_on_purpose, drawn_by)
    assert told == way.__name__.startswith("by_")


@pytest.mark.parametrize("way", [ways_to_leave.error_of_a_condition, ways_to_leave.error_of_setting_an_item])
def test_an_error_that_no_call_raises_discards_the_window(way) -> None:
    """`if several_elements:` and `history[step] = loss` raise without a call."""
    model = small_model()

    class Items:
        def __iter__(self):
            for step, batch in gradsync.sync_every(model, 4, [micro_batch(0, index) for index in range(5)]):
                step.backward(mean_loss(model, batch))
                yield step.index

    with pytest.raises((ValueError, IndexError)):
        way(Items())
    assert all(parameter.grad is None for parameter in model.parameters())
