"""What the optimizers step and no model has, and optimizers and models made anew: exact, or an error on every rank."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from tests.changes.edits import HOWS, WRAPS, backbone_and_head
from tests.changes.rule import Net, Outcome, Run, layer, sum_of_models, told
from tests.changes.together import hold

# -- what the optimizers step and no model has --------------------------------------------------------------------


def temperature(run: Run) -> None:
    """CLIP's: of no model, in the optimizer from the start."""
    run.extra["temperature"] = scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    run.loss = lambda *args: sum_of_models(*args) * scale
    run.optimizer = run.sgd(run.model, scale)
    run.train()


def temperature_that_joins(run: Run) -> None:
    run.train(1)
    run.extra["temperature"] = scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    run.loss = lambda *args: sum_of_models(*args) * scale
    run.optimizer.add_param_group({"params": [scale]})
    run.train()


def temperature_frozen_at_first(run: Run) -> None:
    run.extra["temperature"] = scale = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)
    run.loss = lambda *args: sum_of_models(*args) * scale
    run.optimizer = run.sgd(run.model, scale)
    run.train(1)
    scale.requires_grad_(True)
    run.train()


def temperature_of_some_windows(run: Run) -> None:
    """None where no rank used it, and weight decay would tell."""
    run.extra["temperature"] = scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    run.optimizer = run.sgd(run.model, scale)
    for used in (True, False, True):
        run.loss = (lambda *args: sum_of_models(*args) * scale) if used else sum_of_models
        run.train(1)


def a_loss_module_in_a_closure(run: Run) -> None:
    """A model of its own that the call does not have."""
    outside = layer(2, 2)
    run.extra |= dict(outside.named_parameters())
    run.loss = lambda model, x: outside(model(x)).square().mean()
    run.optimizer = run.sgd(run.model, outside)
    run.train()


def a_second_optimizer_of_the_closure(run: Run) -> None:
    outside = layer(2, 2)
    run.extra |= dict(outside.named_parameters())
    run.loss = lambda model, x: outside(model(x)).square().mean()
    run.optimizers = [run.sgd(run.model), run.sgd(outside)]
    run.train()


OUTSIDE = {
    f.__name__: f
    for f in [
        temperature, temperature_that_joins, temperature_frozen_at_first, temperature_of_some_windows,
        a_loss_module_in_a_closure, a_second_optimizer_of_the_closure,
    ]
}  # fmt: skip


def outside(name: str, how: str, wrap: str, steps: int) -> Outcome:
    return told(OUTSIDE[name], how, wrap, steps)


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_the_optimizers_step_and_no_model_has(ranks, name):
    hold(ranks, 2, outside, product([name], HOWS[:2], WRAPS, [1, 3]), says="parameter|optimizer")


def test_what_no_model_has_is_trained_on_one_rank(ranks):
    hold(ranks, 1, outside, product(OUTSIDE, ["accumulating"], ["bare"], [3]), only="exact")


def left_out(wrap: str, steps: int) -> Outcome:
    """Two models in the call and in the optimizer, `model=` names the first."""

    def story(run: Run) -> None:
        one, two = backbone_and_head(run)
        run.optimizer = run.sgd(one, two)
        run.train()

    return told(story, "accumulating", wrap, steps, model=lambda one, *_: one)


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_model_leaves_out(ranks, size):
    hold(ranks, size, left_out, product(WRAPS[:size], [1, 3]))


# -- optimizers made anew -----------------------------------------------------------------------------------------


def optimizers_made_anew(wrap: str, steps: int) -> Outcome:
    """Python gives a dead optimizer's id to the next: each must step, and one function sees them all."""

    def story(run: Run) -> None:
        for _ in range(20):
            run.optimizer = None
            run.optimizer = run.sgd(run.model)
            run.train(1)

    return told(story, "accumulating", wrap, steps)


@pytest.mark.parametrize("size", [1, 2])
def test_optimizers_made_anew_many_times(ranks, size):
    hold(ranks, size, optimizers_made_anew, product(WRAPS, [1, 3]), only="exact")


def models_made_anew(wrap: str) -> Outcome:
    """The same for models, as a sweep makes them."""

    def story(run: Run) -> None:
        for seed in range(20):
            run.model = run.optimizer = None
            run.models = []
            run.rewrap()
            run.model = Net(seed)
            run.models, run.optimizer = [run.model], run.sgd(run.model)
            run.train(1)

    return told(story, "accumulating", wrap, 2)


@pytest.mark.parametrize("size", [1, 2])
def test_models_made_anew_many_times(ranks, size):
    hold(ranks, size, models_made_anew, product(WRAPS), only="exact")
