"""`over`: calls and items, nesting, looking ahead, leaving early."""

from __future__ import annotations

import pytest
import torch

from gradsync import accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean


def test_over_counts_calls_and_not_items():
    """Items that the loop passes over are no micro-batches, the last one included."""
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in step.over(range(6)):
        if i % 2 == 0:
            step(model, optimizer, micro_batch(0, i))
    expected, _ = train(small_model(), [[(0, 0), (0, 2)], [(0, 4)]], window_mean)
    assert_equal_updates(optimizer.seen, expected)


def test_over_allows_several_calls_an_item():
    step = accumulating(steps=4)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in step.over(range(3)):
        step(model, optimizer, micro_batch(0, 2 * i))
        step(model, optimizer, micro_batch(0, 2 * i + 1))
    assert_equal_updates(optimizer.seen, train(small_model(), cut([6], 4), window_mean)[0])


def test_over_is_sized_if_the_iterable_was_and_leaving_it_early_keeps_the_window_open():
    step = accumulating(steps=4)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    assert len(step.over([1, 2, 3])) == 3
    with pytest.raises(TypeError):
        len(step.over(iter([1])))
    with pytest.warns(RuntimeWarning, match=r"window open: 2 micro-batches .*\.flush\(\).*\.reset\(\)"):
        for i in step.over(range(10)):
            step(model, optimizer, micro_batch(0, i))
            if i == 5:
                break
    assert step.progress.index == 2 and step.progress.updates == 1
    step.flush()
    assert_equal_updates(optimizer.seen, train(small_model(), cut([6], 4), window_mean)[0])
    step.flush()  # nothing to do is fine
    assert step.progress.updates == 2


@pytest.mark.parametrize("length", range(9))
def test_over_of_several_functions_nests(length):
    """One look-ahead serves them all: that of the outer one would end the inner one an item too soon."""
    pairs = []
    for steps in (4, 3):
        model = small_model()
        step = accumulating(steps=steps)(lambda model, optimizer, x: mean_loss(model, x))
        pairs.append((step, model, Recorder(model.parameters())))
    (one, *a), (two, *b) = pairs
    nested = one.over(two.over(range(length)))
    assert len(nested) == length
    for i in nested:
        one(*a, micro_batch(0, i))
        two(*b, micro_batch(0, i))
    for (_, _, optimizer), steps in zip(pairs, (4, 3)):
        assert_equal_updates(optimizer.seen, train(small_model(), cut([length], steps), window_mean)[0])


def test_over_is_one_item_ahead_and_the_last_call_is_the_boundary():
    taken = []

    def loader():
        for i in range(3):
            taken.append(i)
            yield i

    step = accumulating(steps=4)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    stepped = []
    for i in step.over(loader()):
        assert len(taken) == min(3, i + 2)
        step(model, optimizer, micro_batch(0, i))
        stepped.append(step.progress.stepped)
    assert stepped == [False, False, True]


def test_nested_loops_after_many_optimizers():
    """Each optimizer has windows of its own; those of two functions stay apart, however many there were."""
    one, two = (accumulating(steps=1)(lambda model, optimizer, x: model(x).sum()) for _ in range(2))
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    two(other, second, torch.ones(1, 1))
    for _ in range(1025):
        first = torch.optim.SGD(model.parameters(), lr=0.1)
        one(model, first, torch.ones(1, 1))
    for x in two.over(one.over(torch.ones(2, 1, 1))):
        one(model, first, x)
        two(other, second, x)
    assert (one.progress.updates, two.progress.updates) == (3, 3)
