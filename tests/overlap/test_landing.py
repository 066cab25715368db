"""Where updates land that come late, and where their errors are raised: in the same place on every rank."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync import GradSyncError
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch

STEPS = 3


class AddsUp:
    """An `on_update` with a collective: the sums of the updates that the ranks have told of."""

    def __init__(self):
        self.sums = []

    def __call__(self, progress) -> None:
        here = torch.tensor([float(progress.updates)])
        dist.all_reduce(here)
        self.sums.append(here.item())


class Failed(Exception):
    """Of an `on_update`."""


def fail_once(progress) -> None:
    if progress.updates == 1:
        raise Failed


class Training:
    """A decorated function, whose micro-batch `infinite` has no finite loss. `body` is called in place of `loss`."""

    def __init__(self, overlap: int, infinite: int = -1, body=None, **options):
        self.rank, self.model, self.infinite = dist.get_rank(), small_model(), infinite
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = gradsync.accumulating(
            STEPS, model=self.model, optimizer=self.optimizer, overlap=overlap, **options
        )(self.loss if body is None else body)  # fmt: skip

    def loss(self, index: int):
        return mean_loss(self.model, micro_batch(self.rank, index)) * (torch.inf if index == self.infinite else 1)


# -- behind a `break` -----------------------------------------------------------------------------------------------


def left_by_break(overlap: int, what: str, then: str) -> str:
    options = {"nonfinite": "raise", "infinite": STEPS - 1} if what == "nonfinite" else {"on_update": fail_once}
    training = Training(overlap, **options)
    step = training.step
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for index in step.over(range(9)):
            step(index)
            if index == STEPS - 1:
                break
    assert [one.category for one in told] == [RuntimeWarning]
    nexts = {
        "settle": step.settle, "flush": step.flush, "state_dict": step.state_dict, "over": lambda: [*map(step, step.over(range(9)))],
        "plain": lambda: [*map(step, range(9))], "uneven": lambda: [*map(step, step.over(range(9 * training.rank)))],
    }  # fmt: skip
    training.infinite = -1
    with pytest.raises((GradSyncError, Failed)):
        nexts[then]()
    step.reset()
    step.settle()  # it is raised once
    return str(told[0].message)


@pytest.mark.parametrize("what", ["nonfinite", "on_update"])
@pytest.mark.parametrize("overlap", [1, STEPS])
@pytest.mark.parametrize("then", ["settle", "flush", "state_dict", "over", "plain", "uneven"])
def test_an_error_of_an_update_that_lands_at_a_break_is_raised_by_what_comes_next(ranks, overlap, what, then):
    """A generator that is closed cannot raise: Python printed the error, and the program went on."""
    for told in ranks(2).run(left_by_break, overlap, what, then, limit=20):
        assert ("must be finite" if what == "nonfinite" else "Failed()") in told
        assert "failed as the loop was left" in told and "flush() or settle()" in told


class Trainer:
    """Its method is decorated."""

    def __init__(self):
        self.model = small_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @gradsync.accumulating(
        STEPS, overlap=1, model=lambda self, _: self.model, optimizer=lambda self, _: self.optimizer,
        on_update=lambda _, progress: fail_once(progress),
    )  # fmt: skip
    def step(self, index: int):
        return mean_loss(self.model, micro_batch(dist.get_rank(), index))


def dropped_with_an_error() -> list[str]:
    """A trainer goes whose last update has failed, which nobody has been told."""
    trainer = Trainer()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for index in trainer.step.over(range(9)):
            trainer.step(index)
            if index == STEPS - 1:
                break
        gone = [weakref.ref(one) for one in (trainer, trainer.model, trainer.optimizer)]
        del trainer
        gc.collect()
    assert not any(ref() for ref in gone)
    return [str(one.message) for one in told]


def test_an_error_that_waits_keeps_nothing_alive_and_is_told_of_at_the_end(ranks):
    for told in ranks(2).run(dropped_with_an_error):
        assert len(told) == 2 and "failed as the loop was left" in told[0]
        assert "ended, and its last update had failed: Failed()" in told[1]


# -- on a rank that is at another place -----------------------------------------------------------------------------


def without_an_item(overlap: int, what: str) -> None:
    """What travels was sent by plain calls; in the loop behind these, rank 0 has no item."""
    adds = AddsUp()
    options = {"nonfinite": "raise", "infinite": STEPS - 1} if what == "nonfinite" else {"on_update": adds}
    training = Training(overlap, **options)
    for index in range(STEPS):
        training.step(index)
    training.infinite = -1

    def loop() -> None:
        for index in training.step.over(range(4 * training.rank)):
            training.step(index)

    if what == "nonfinite":
        with pytest.raises(GradSyncError, match="must be finite"):
            loop()
    else:
        loop()
        assert adds.sums == [2.0, 4.0, 6.0]


@pytest.mark.parametrize(("overlap", "what"), [(1, "collective"), (2, "collective"), (1, "nonfinite"), (STEPS, "nonfinite")])
def test_a_rank_without_an_item_meets_the_others_before_it_lands(ranks, overlap, what):
    """It waited in its `on_update`, or had raised, and the others waited where the loop begins."""
    ranks(2).run(without_an_item, overlap, what, limit=20)


def behind_another_function(overlap: int, num_plain: int) -> tuple[list, str]:
    """The last of the plain calls has left a window travelling, or open, when another function's loop begins."""
    adds = AddsUp()
    training = Training(1, on_update=adds)
    other = gradsync.accumulating(STEPS, model=training.model, optimizer=training.optimizer, overlap=overlap)(training.loss)
    for index in other.over(range(STEPS)):  # so that it knows its ranks already
        other(index)
    other.settle()
    for index in range(num_plain):
        training.step(index)
    try:
        for index in other.over(range(4 * training.rank)):
            other(index)
        other.settle()
    except GradSyncError as error:
        return adds.sums, str(error)
    return adds.sums, ""


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_rank_without_an_item_lands_what_another_function_has_sent(ranks, overlap):
    """Its `on_update` waited for that of the others, which were at the loop's table."""
    assert ranks(2).run(behind_another_function, overlap, 2 * STEPS, limit=20) == [([2.0, 4.0], "")] * 2


def test_a_rank_without_an_item_hears_of_another_functions_open_window(ranks):
    for _, told in ranks(2).run(behind_another_function, 0, STEPS + 1, limit=20):
        assert "in one open window at a time" in told


def behind_an_exception_on_all_ranks() -> None:
    """A window travels, each rank has an exception, and then rank 0 has no item in the loop."""
    adds = AddsUp()

    def failing(index: int):
        if index < 0:
            raise KeyError
        return training.loss(index)

    training = Training(1, body=failing, on_update=adds)
    step = training.step
    for index in range(STEPS):
        step(index)
    with pytest.raises(KeyError):
        step(-1)
    for index in step.over(range(4 * training.rank)):
        step(index)
    assert adds.sums == [2.0, 4.0, 6.0]


def test_what_an_exception_left_lands_when_the_ranks_have_met(ranks):
    ranks(2).run(behind_an_exception_on_all_ranks, limit=20)


def raised_in_which_window(overlap: int) -> int:
    """Rank 1 has an exception of its own while a window travels that is not finite."""

    def failing(index: int):
        if (training.rank, index) == (1, STEPS):
            raise KeyError
        return training.loss(index)

    training = Training(overlap, infinite=STEPS - 1, body=failing, nonfinite="raise")
    step = training.step
    with pytest.raises(GradSyncError, match="must be finite"):
        for index in step.over(range(4 * STEPS)):
            try:
                step(index)
            except KeyError:
                assert training.rank == 1
    return step.progress.window


@pytest.mark.parametrize("overlap", [1, STEPS])
def test_after_an_exception_of_one_rank_a_window_that_is_not_finite_raises_on_every_rank(ranks, overlap):
    """That rank lands it earlier than the others; it raised there, and they waited for it in the next boundary."""
    windows = ranks(2).run(raised_in_which_window, overlap, limit=20)
    assert windows == ([1, 1] if overlap < STEPS else [2, 2])


# -- what is told of it ---------------------------------------------------------------------------------------------


def saved_in_on_update() -> list[tuple[int, int, int, float]]:
    """The updates of progress, function and scheduler, and the learning rate, as each `on_update` saves them."""
    saved = []

    def save(progress) -> None:
        states = [training.step.state_dict(), scheduler.state_dict(), training.optimizer.state_dict()]
        (window,) = states[0]["windows"]
        saved.append((progress.updates, window["updates"], states[1]["last_epoch"], states[2]["param_groups"][0]["lr"]))

    training = Training(STEPS, scheduler=lambda _: scheduler, on_update=save)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
    for index in training.step.over(range(4 * STEPS)):
        training.step(index)
    return saved


def test_a_state_that_is_saved_in_on_update_lands_the_next_window_and_its_on_update_comes_after_it(ranks):
    for saved in ranks(2).run(saved_in_on_update):
        assert saved == [(n, m, m, 0.1 * 0.5**m) for n, m in ((1, 2), (2, 2), (3, 4), (4, 4))]


def raises_after_settle() -> list[int]:
    """The updates of which `on_update` was told, the first of which lands the next one, and raises."""
    told = []

    def note(progress) -> None:
        told.append(progress.updates)
        if len(told) == 1:
            training.step.settle()
            raise Failed

    training = Training(STEPS, on_update=note)
    for index in range(3 * STEPS):
        try:
            training.step(index)
        except Failed:
            told.append(-1)
    training.step.settle()
    return told


def test_an_update_that_lands_in_on_update_is_told_of_also_where_that_raises(ranks):
    assert ranks(2).run(raises_after_settle) == [[1, 2, -1, 3]] * 2


def of_the_last_window(overlap: int) -> list:
    """Five items and three: the tail is dropped, and the window before it may land in the same call."""
    training = Training(overlap, tail="drop", clip_norm=1.0)
    for index in training.step.over(range(5 - 2 * training.rank)):
        training.step(index)
    progress = training.step.progress
    return [progress.updates, progress.skipped, progress.window, progress.grad_norm, progress.global_loss]


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_progress_tells_of_the_last_window_only(ranks, overlap):
    """The loss was that of the dropped tail, and the norm that of the window before it."""
    for now, then in zip(ranks(2).run(of_the_last_window, overlap), ranks(2).run(of_the_last_window, 0), strict=True):
        assert now[:4] == then[:4] == [1, 1, 2, None]
        assert now[4] == pytest.approx(then[4], abs=0.1)
