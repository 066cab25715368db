"""States that go to the wrong rank, or into another program than they came from: exact, or an error on every rank."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist

from gradsync import GradSyncError, LossSum
from tests.changes.rule import LIMIT, Outcome, Run, compare, exact_or_error, layer, my_rank, outcomes, sum_of_models

STEPS = 3


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def its_own(state: dict) -> dict:
    return state


def everybodys(state: dict) -> list[dict]:
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def rank_0s(state: dict) -> dict:
    return everybodys(state)[0]


def the_next_ranks(state: dict) -> dict:
    return everybodys(state)[(my_rank() + 1) % dist.get_world_size()]


def interrupted(wrap: str, held: int, whose, called: bool) -> str:
    """Saved in a window, loaded in another run, which may have been called: a state of `whose`; what was said."""
    one = Run("accumulating", wrap, STEPS)
    one.train(1)
    for _ in range(held):
        one.micro()
    state = through_a_file(whose(one._step.state_dict()))
    weights = {k: v.clone() for k, v in one.model.state_dict().items()}
    one._step.reset()
    two = Run("accumulating", wrap, STEPS)
    two.drawn = one.drawn
    reference = Run("reference", wrap, STEPS)
    reference.train(3)
    said = ""
    try:
        if called:
            two.micro()
            two._step.reset()
            two.drawn = one.drawn
        two.model.load_state_dict(weights)
        two._step.load_state_dict(state)
        if held and whose is not its_own:
            two.micro()  # it is held: who may go on waits for nobody
            two._step.reset()
            return said
        for _ in range(STEPS - held):
            two.micro()
        two.train(1)
    except GradSyncError as error:
        said = str(error)
        two._step.reset()
    else:
        compare(two.trace[1 if len(two.trace) > 2 else 0 :], reference.trace[1:])
    return said


called_or_not = pytest.mark.parametrize("called", [False, True], ids=["before a call", "after a call"])


@called_or_not
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
@pytest.mark.parametrize("held", [1, 2])
def test_each_ranks_own_state_resumes_exactly(ranks, wrap, held, called):
    assert ranks(2).run(interrupted, wrap, held, its_own, called, limit=LIMIT) == ["", ""]


@called_or_not
@pytest.mark.parametrize(("whose", "refusing"), [(rank_0s, [1]), (the_next_ranks, [0, 1])])
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_another_ranks_held_gradients_are_an_error(ranks, wrap, whose, refusing, called):
    """Not everybody gets rank 0's gradients: as they are loaded, or at the next call, before anything travels."""
    said = ranks(2).run(interrupted, wrap, 1, whose, called, limit=LIMIT)
    for rank in refusing:
        assert "rank" in said[rank] and len(said[rank].split()) > 8, said


@pytest.mark.parametrize("wrap", ["bare", "ddp"])
@called_or_not
def test_a_state_between_windows_is_anybodys(ranks, wrap, called):
    """What rank 0 saves at an epoch's end, everybody may load: there are no gradients in it."""
    assert ranks(2).run(interrupted, wrap, 0, rank_0s, called, limit=LIMIT) == ["", ""]


def another_head(model) -> None:
    model.head = layer(5, 3)


def fewer_layers(model) -> None:
    del model.body[2]


def more_layers(model) -> None:
    model.body.append(layer(5, 5))


def edited_since(edit, called: bool) -> Outcome:
    """The state's gradients are for parameters that the model of now does not have, or has in another shape."""
    one = Run("accumulating", "bare", STEPS)
    one.train(1)
    one.micro()
    state = through_a_file(one._step.state_dict())
    one._step.reset()
    two = Run("accumulating", "bare", STEPS)
    two.train(int(called))
    edit(two.model)
    two.optimizer = two.sgd(two.model)
    try:
        two._step.load_state_dict(state)
        two.micro()
        two.micro()
    except GradSyncError as error:
        return Outcome("error", str(error))
    except ValueError as error:
        return Outcome("error", str(error))
    except Exception as error:  # noqa: BLE001
        return Outcome("foreign", repr(error))
    return Outcome("exact", "a state of another model was taken")


@pytest.mark.parametrize("size", [1, 2])
@called_or_not
@pytest.mark.parametrize(("edit", "only"), [(another_head, "error"), (fewer_layers, "error"), (more_layers, "")])
def test_a_state_of_another_model(ranks, edit, only, called, size):
    exact_or_error(outcomes(ranks, size, edited_since, edit, called), only=only)


def counts_travel_with_the_state() -> Outcome:
    """Sums: the half window's count is part of it."""
    rank, traces = my_rank(), []
    for again in (False, True):
        run = Run("accumulating", "bare", STEPS)
        run.loss = lambda model, x: LossSum(sum_of_models(model, x) * len(x), len(x) + rank)
        run.micro()
        run.micro()
        if again:
            state = through_a_file(run._step.state_dict())
            run._step.reset()
            run._step = run._function()
            run._step.load_state_dict(state)
        run.micro()
        traces.append(run.trace)
    compare(traces[1], traces[0], 0.0)
    return Outcome("exact")


@pytest.mark.parametrize("size", [1, 2])
def test_a_state_with_counts(ranks, size):
    exact_or_error(outcomes(ranks, size, counts_travel_with_the_state), only="exact")
