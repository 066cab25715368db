"""What `state_dict` saves, `load_state_dict` goes on with, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradsync import accumulating
from tests.resume.runs import (
    BUFFERS, BUFFERS_ON_DDP, CARRY, CLIP, EACH, FIND_UNUSED, FUNCTION, MEAN, NOT_IN_A_MODULE, ON_DDP, SCALER, SCHEDULER, SKIP,
    STATIC, SUM, SUM_FLOAT, SUM_TENSOR, TWO_MODELS, UNUSED, VIEWS, Run, calls, finish, flush, over, resumed_anywhere,
)  # fmt: skip
from tests.support.compare import assert_equal_state
from tests.support.files import through_a_file
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch

KINDS = [
    MEAN, SUM, SUM_FLOAT, SUM_TENSOR, SCALER, SCHEDULER, CLIP, SKIP, TWO_MODELS, NOT_IN_A_MODULE,
    BUFFERS, UNUSED, FUNCTION, EACH, CARRY,
]  # fmt: skip


def name_of(one) -> str | None:
    """The name of a kind in a test's own; pytest finds that of a function itself."""
    return getattr(one, "name", None)


@pytest.mark.filterwarnings("ignore:The loop over .* was left with a window open")
@pytest.mark.parametrize("loop", [calls, flush, over])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_resumed_after_any_micro_batch(kind, loop):
    resumed_anywhere(kind, loop)


@pytest.mark.parametrize(
    ("kind", "loop", "lengths"),
    [
        (MEAN, over, [7, 7]), (MEAN, flush, None), (MEAN, over, [5, 8]), (MEAN, over, [8, 5]),
        (SUM_TENSOR, over, [7, 7]), (SCALER, over, [7, 7]), (SKIP, over, [7, 7]), (CARRY, over, [7, 7]),
        (BUFFERS, over, [7, 7]), (BUFFERS, over, [5, 8]), (BUFFERS_ON_DDP, over, [7, 7]), (ON_DDP, flush, None),
        (STATIC, over, [7, 7]), (VIEWS, over, [7, 7]), (FIND_UNUSED, over, [7, 7]), (UNUSED, over, [7, 7]),
    ],
    ids=name_of,
)  # fmt: skip
def test_resumed_after_any_micro_batch_on_two_ranks(ranks, kind, loop, lengths):
    """Each rank saves its own gradients in the middle of a window, and loading does not communicate."""
    ranks(2).run(resumed_anywhere, kind, loop, lengths)


def bare_and_ddp() -> None:
    """The same names with and without a wrapper: what was saved on one can be loaded on the other."""
    rank = dist.get_rank()
    expected = finish(Run(ON_DDP, rank), 0, over)
    for one, other in ((ON_DDP, MEAN), (MEAN, ON_DDP)):
        run = Run(one, rank)
        for i in range(5):
            run.call(i)
        state = run.save()
        run.step.reset()
        again = Run(other, rank)
        again.load(state)
        assert_equal_state(expected, finish(again, 5, over))


def test_a_state_goes_from_ddp_to_the_bare_model_and_back(ranks):
    ranks(2).run(bare_and_ddp)


def every_sample_once(stop: int) -> list[list[int]]:
    """The samples that this rank learnt from, by epoch, in a run that is cut and gone on with."""
    rank, size = dist.get_rank(), dist.get_world_size()
    in_epoch, seen, state = 5, [[], []], None
    for limit in (stop, 10**6):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @accumulating(steps=2)
        def step(model, optimizer, numbers, epoch):
            seen[epoch] += numbers
            return mean_loss(model, micro_batch(0, numbers[0]))

        if state is not None:
            step.load_state_dict(state)
        for epoch in range(step.progress.micro_steps // in_epoch, 2):
            order = torch.randperm(in_epoch * size * 3, generator=torch.Generator().manual_seed(epoch)).view(-1, 3)
            mine = order[rank::size].tolist()
            for numbers in step.over(mine[step.progress.micro_steps - epoch * in_epoch :]):
                step(model, optimizer, numbers, epoch)
                if step.progress.micro_steps == limit:
                    break
            else:
                continue
            break
        state = through_a_file(step.state_dict())
        step.reset()
    return seen


@pytest.mark.parametrize("stop", range(10))
def test_no_sample_is_skipped_or_seen_twice(ranks, stop):
    """The position is `progress.micro_steps`, as examples/resume.py has it, known before the first call."""
    seen = ranks(2).run(every_sample_once, stop)
    for epoch in range(2):
        assert sorted(seen[0][epoch] + seen[1][epoch]) == list(range(30))


def test_a_live_function_goes_back():
    """Loading replaces what is open, gradients included, at a boundary and in the middle of a window."""
    run = Run()
    states = []
    for i in range(7):
        states.append(run.save())
        run.call(i)
    expected = run.result()
    for place in (4, 0, 6, 3):
        run.load(states[place])
        assert run.step.progress.micro_steps == place
        assert (run.model[0].weight.grad is None) == (place % 3 == 0)
        for i in range(place, 7):
            run.call(i)
        assert_equal_state(expected, run.result())
    run.step.reset()
