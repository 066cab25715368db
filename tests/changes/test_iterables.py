"""What `.over` draws, and when: nothing ahead where the length is known, one item where it is not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradsync import GradSyncError, accumulating
from tests.changes.rule import LIMIT, my_rank, outcomes
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean


class Drawn:
    """An iterable that counts what was drawn from it, and may know, or misjudge, its length."""

    def __init__(self, items: list) -> None:
        self.items, self.drawn = items, 0

    def __iter__(self):
        for item in self.items:
            self.drawn += 1
            yield item


class Sized(Drawn):
    def __init__(self, items: list, said: int | None = None) -> None:
        super().__init__(items)
        self.said = len(items) if said is None else said

    def __len__(self) -> int:
        return self.said


def ahead(kind: type[Drawn], length: int, steps: int) -> list[int]:
    """How many items were drawn beyond the one in hand, at each turn of the loop."""
    model = small_model()
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=steps)(lambda model, optimizer, x: mean_loss(model, x))
    rank = my_rank()
    items = [micro_batch(rank, i) for i in range(length)]
    loader = kind(items)
    seen = []
    for i, x in enumerate(step.over(loader)):
        seen.append(loader.drawn - i - 1)
        step(model, optimizer, x)
        seen.append(loader.drawn - i - 1)
    lengths = [length] * (dist.get_world_size() if dist.is_initialized() else 1)
    assert_equal_updates(optimizer.seen, train(small_model(), cut(lengths, steps), window_mean)[0])
    return seen


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_nothing_is_drawn_ahead_where_the_length_is_known(ranks, length, steps, size):
    for seen in outcomes(ranks, size, ahead, Sized, length, steps):
        assert set(seen) == {0}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_one_item_is_drawn_ahead_where_it_is_not(ranks, length, steps, size):
    for seen in outcomes(ranks, size, ahead, Drawn, length, steps):
        assert set(seen) <= {0, 1}


def test_an_iterable_that_raises_loses_no_good_item():
    """Where the length is known the error comes in the turn it belongs to: the items before it were trained on."""

    class Breaks(Sized):
        def __iter__(self):
            yield from self.items[:3]
            raise OSError("the disk")

    model = small_model()
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=1)(lambda model, optimizer, x: mean_loss(model, x))
    with pytest.raises(OSError, match="the disk"):
        for x in step.over(Breaks([micro_batch(0, i) for i in range(5)])):
            step(model, optimizer, x)
    assert_equal_updates(optimizer.seen, train(small_model(), cut([3], 1), window_mean)[0])


def wrong_length(lengths: list[int], said: list[int], steps: int) -> list:
    """A length that is not true, on one of the ranks."""
    rank = my_rank()
    model = small_model()
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=steps)(lambda model, optimizer, x: mean_loss(model, x))
    calls, error = 0, ""
    try:
        for x in step.over(Sized([micro_batch(rank, i) for i in range(lengths[rank])], said[rank])):
            step(model, optimizer, x)
            calls += 1
    except GradSyncError as raised:
        error = str(raised)
    if not error:
        used = [min(pair) for pair in zip(lengths, said)]  # what goes beyond its length is an error on its rank
        expected, _ = train(small_model(), cut(used, steps), window_mean)
        assert_equal_updates(optimizer.seen, expected)
    return [calls, error]


@pytest.mark.parametrize("steps", [1, 3])
def test_more_items_than_the_length_says_are_an_error(steps):
    """Before the next window: what was promised is trained on, and nothing after it."""
    calls, error = wrong_length([8], [6], steps)
    assert calls == 6 and "6" in error and "len" in error.lower(), error


@pytest.mark.parametrize("steps", [1, 3])
def test_more_items_than_the_length_says_on_two_ranks(ranks, steps):
    for calls, error in ranks(2).run(wrong_length, [8, 8], [6, 6], steps, limit=LIMIT):
        assert calls == 6 and "6" in error, error


@pytest.mark.parametrize("steps", [1, 3])
def test_more_items_than_the_length_says_on_one_of_two_ranks(ranks, steps):
    """The rank that misjudged is told before its next window; the other one ends well, or is told too."""
    (_, fine), (calls, error) = ranks(2).run(wrong_length, [6, 8], [6, 6], steps, limit=LIMIT)
    assert calls == 6 and "6" in error, (fine, error)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_fewer_items_than_the_length_says_are_harmless(ranks, steps, size):
    for lengths, said in ([[5, 5], [9, 9]], [[5, 7], [9, 7]]):
        for place, (calls, error) in enumerate(
            outcomes(ranks, size, wrong_length, lengths[:size], said[:size], steps)
        ):
            assert not error and calls == lengths[place]


def test_a_loop_that_is_saved_in_its_middle_skips_nothing():
    """A loader that counts what it gave, saved beside the step: gone on with, each item is seen once."""
    model = small_model()
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    loader = Sized(list(range(6)))
    for i in step.over(loader):
        step(model, optimizer, micro_batch(0, i))
        if i == 3:
            assert loader.drawn == step.progress.micro_steps == 4
            break
    for i in step.over(range(loader.drawn, 6)):
        step(model, optimizer, micro_batch(0, i))
    assert_equal_updates(optimizer.seen, train(small_model(), cut([6], 2), window_mean)[0])


def gathered_for_metrics() -> list[int]:
    """Accelerate tells the last batch's padding from the loader's end: an item drawn ahead made it cut others."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state() if state is not GradientState else state._shared_state.clear()
    with_it = Accelerator(cpu=True)
    data = torch.utils.data.TensorDataset(torch.arange(13.0).double())
    loader = with_it.prepare(torch.utils.data.DataLoader(data, batch_size=2))
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = accumulating(steps=2)(lambda model, optimizer, x: model(x).square().mean())
    seen: list[int] = []
    for (x,) in step.over(loader):
        step(model, optimizer, x[:, None])
        seen += with_it.gather_for_metrics(x).long().tolist()
    return sorted(seen)


def test_accelerates_gather_for_metrics_sees_each_sample_once(ranks):
    for size in (1, 2):
        assert ranks(size).run(gathered_for_metrics, limit=LIMIT) == [list(range(13))] * size
