"""What a third front may do wrong with `Run`: the same on one rank and on several, and never a silently wrong update."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsync import GradSyncError
from gradsync import functional as F
from tests.functional.test_another_decorator import accumulate
from tests.support.compare import assert_equal_state
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch, states, sum_loss, window_mean


def rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def begun(terms: F.Terms):
    model = small_model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), F.Run("by hand", terms)


def refusal(run: F.Run, call) -> str:
    with pytest.raises(GradSyncError) as caught:
        call()
    run.discard()
    return str(caught.value)


def a_place_that_is_not_missed(role: F.Role) -> str:
    model, optimizer, run = begun(F.Terms(2))
    place = run.start(F.Who([model], [optimizer]))._replace(role=role)
    return refusal(run, lambda: run.miss(place))


def a_drop_that_no_table_tells_of() -> str:
    model, optimizer, run = begun(F.Terms(2))
    place = run.start(F.Who([model], [optimizer]))
    return refusal(run, lambda: run.drop(place))


def an_update_with_held_gradients() -> str:
    model, optimizer, run = begun(F.Terms(2))
    place = run.start(F.Who([model], [optimizer]))
    with run.holding(place):
        assert run.backward(place, mean_loss(model, micro_batch(rank_here(), 0))) is None
    before = [parameter.detach().clone() for parameter in model.parameters()]
    said = refusal(run, lambda: F.update([optimizer]))
    assert all(map(torch.equal, before, model.parameters()))
    return said


def a_close_of_a_window_that_is_held() -> str:
    model, optimizer, run = begun(F.Terms(2))
    place = run.start(F.Who([model], [optimizer]))
    with run.holding(place):
        assert run.backward(place, mean_loss(model, micro_batch(rank_here(), 0))) is None
    return refusal(run, run.close)


def micro_batches(num: int, model: nn.Module, who: F.Who, run: F.Run) -> list[F.Place]:
    """The places of so many micro-batches."""
    places = []
    for index in range(num):
        places.append(run.start(who))
        with run.holding(places[-1]):
            run.backward(places[-1], mean_loss(model, micro_batch(rank_here(), index)))
    return places


def a_call_before_the_window_is_closed() -> str:
    model, optimizer, run = begun(F.Terms(2))
    who = F.Who([model], [optimizer])
    micro_batches(2, model, who, run)
    return refusal(run, lambda: run.start(who))


def a_second_backward(num: int, place: int) -> str:
    model, optimizer, run = begun(F.Terms(2))
    places = micro_batches(num, model, F.Who([model], [optimizer]), run)
    return refusal(run, lambda: run.backward(places[place], mean_loss(model, micro_batch(rank_here(), 9))))


def a_second_close() -> str:
    model, optimizer, run = begun(F.Terms(2))
    micro_batches(2, model, F.Who([model], [optimizer]), run)
    run.close()
    return refusal(run, run.close)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("case", "args", "words"),
    [
        (a_close_of_a_window_that_is_held, (), "has had 1 of 2 micro-batches"),
        (a_call_before_the_window_is_closed, (), "must be closed before the next call"),
        (a_second_backward, (2, 1), "that of micro-batch 1 of window 0 has had its own"),
        (a_second_backward, (1, 0), "that of micro-batch 0 of window 0 has had its own"),
        (a_second_backward, (2, 0), "that of micro-batch 0 of window 0 has had its own"),
        (a_second_close, (), "needs an open window here, but none is open"),
        (a_place_that_is_not_missed, (F.Role.RUNS,), "Only a place of Role.MISSES can be missed"),
        (a_place_that_is_not_missed, (F.Role.REPEATS,), "the last one, once more"),
        (a_drop_that_no_table_tells_of, (), "needs a table in each window"),
        (an_update_with_held_gradients, (), "needs gradients that are synchronised"),
    ],
)
def test_an_error_at_once_on_every_rank(ranks, size, case, args, words):
    for text in ranks(size).run(case, *args):
        assert words in text


@pytest.mark.parametrize("wrong", [{"tail": "dorp"}, {"sync": "eech"}, {"repeats": "never"}])
def test_settings_that_do_not_exist(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be one of"):
        F.Terms(2, **wrong)


def a_dropped_tail() -> None:
    """Three micro-batches in windows of two; the tail, and its gradients, are gone as the next window begins."""
    rank, size = rank_here(), dist.get_world_size()
    model, optimizer, run = begun(F.Terms(2, tail="drop"))
    who, loop = F.Who([model], [optimizer]), F.Loop("by hand", 3, lambda: [run])
    for index in loop.items(range(3)):
        place = run.start(who, loop)
        with run.holding(place):
            closing = run.backward(place, mean_loss(model, micro_batch(rank, index)))
        if closing is not None:
            assert (closing.factor is None) == (index == 2)
            if closing.factor is not None:
                F.update([optimizer], factor=closing.factor)
            run.close()
    assert not list(loop.rest())
    assert all(parameter.grad is None for parameter in model.parameters()) and run.number == 2
    expected = states(small_model(), [[(r, i) for r in range(size) for i in range(2)]], window_mean, lr=0.1)[-1]
    assert_equal_state(model.state_dict(), expected, 1e-12)


def counts_of_nothing() -> None:
    """A window whose counts add up to zero leaves nothing for the next one, in the docstring's own decorator."""
    rank, size = rank_here(), dist.get_world_size()
    model, optimizer, _ = begun(F.Terms(1))

    @accumulate()(1, model, optimizer)
    def train(item):
        index, count = item
        return F.LossSum(sum_loss(model, micro_batch(rank, index)), count)

    for item in train.over([(0, 0), (1, 2)]):
        train(item)
    alone = small_model()
    loss = sum(sum_loss(alone, micro_batch(r, 1)) for r in range(size)) / (2 * size)
    loss.backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert_equal_state(model.state_dict(), alone.state_dict(), 1e-12)


def a_loop_that_is_left() -> None:
    """All ranks break together after a whole window; the next loop of the docstring's decorator is like the first."""
    rank, size = rank_here(), dist.get_world_size()
    model, optimizer, _ = begun(F.Terms(1))

    @accumulate()(2, model, optimizer)
    def train(batch):
        return mean_loss(model, batch)

    for index, batch in enumerate(train.over([micro_batch(rank, i) for i in range(5 - rank)])):
        train(batch)
        if index == 1:
            break
    for batch in train.over([micro_batch(rank, i) for i in range(2, 5 - rank)]):
        train(batch)
    windows = [[(r, i) for r in range(size) for i in (n, n + 1) if i < 5 - r] for n in (0, 2, 4)]
    assert_equal_state(model.state_dict(), states(small_model(), [w for w in windows if w], window_mean, lr=0.1)[-1], 1e-12)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", [a_dropped_tail, counts_of_nothing, a_loop_that_is_left])
def test_what_stays_exact(ranks, size, case):
    ranks(size).run(case)


@pytest.mark.parametrize(("first", "what"), [(False, "came"), (True, "went")])
def test_a_scaler_that_comes_or_goes_in_the_middle_of_a_window(first, what):
    model, optimizer, run = begun(F.Terms(2))
    scaler, who = torch.amp.GradScaler("cpu", init_scale=4.0), F.Who([model], [optimizer])
    place = run.start(who)
    with run.holding(place):
        run.backward(place, mean_loss(model, micro_batch(0, 0)), scaler=scaler if first else None)
    place = run.start(who)
    with run.holding(place), pytest.raises(GradSyncError, match=f"or none of them, but a GradScaler {what} in the middle"):
        run.backward(place, mean_loss(model, micro_batch(0, 1)), scaler=None if first else scaler)
    run.discard()
