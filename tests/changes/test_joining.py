"""Participants that are frozen at first, that join and leave, and models that share: exact, or an error on every rank."""

from __future__ import annotations

import gc
from itertools import product

import pytest

from tests.changes.edits import HOWS, WRAPS, backbone_and_head
from tests.changes.rule import Net, Outcome, Run, told
from tests.changes.together import hold

# -- frozen at first, and whoever joins later ---------------------------------------------------------------------


def unfrozen_later(run: Run) -> None:
    """Frozen in the first windows, though in the optimizer."""
    run.model.body.requires_grad_(False)
    run.train()
    run.model.body.requires_grad_(True)
    run.train()


def unfrozen_layer_by_layer(run: Run) -> None:
    """As fine-tuning does, each with a group of its own."""
    run.model.requires_grad_(False)
    run.model.head.requires_grad_(True)
    run.optimizer = run.sgd(run.model.head)
    run.train(1)
    for part in (run.model.body[2], run.model.body[0], run.model.inp):
        part.requires_grad_(True)
        run.optimizer.add_param_group({"params": list(part.parameters())})
        run.train(1)


def a_whole_model_is_unfrozen(run: Run) -> None:
    """The backbone in the optimizer, frozen at first: a model without an engine."""
    one, two = backbone_and_head(run)
    run.optimizer = run.sgd(one, two)
    one.requires_grad_(False)
    run.train()
    one.requires_grad_(True)
    run.train()


def a_bystander_joins(run: Run) -> None:
    one, two = backbone_and_head(run)
    run.optimizer = run.sgd(two)
    run.train()
    if run.how.startswith("accumulating"):
        assert all(p.grad is None for p in one.parameters()), "gradients stay in a bystander"
    one.zero_grad()  # by hand, and where no optimizer is known, it has those of all windows until now
    run.optimizer.add_param_group({"params": list(one.parameters())})
    run.train()


def a_bystander_joins_frozen_and_is_unfrozen(run: Run) -> None:
    one, two = backbone_and_head(run)
    one.requires_grad_(False)
    run.optimizer = run.sgd(two)
    run.train(1)
    run.optimizer.add_param_group({"params": list(one.parameters())})
    run.train(1)
    one.requires_grad_(True)
    run.train()


def a_part_leaves_the_optimizer(run: Run) -> None:
    one, two = backbone_and_head(run)
    run.optimizer = run.sgd(one, two)
    run.train()
    run.optimizer = run.sgd(two)
    one.requires_grad_(False)
    run.train()


def a_second_optimizer_comes(run: Run) -> None:
    one, two = backbone_and_head(run)
    run.optimizers = [run.sgd(two)]
    one.requires_grad_(False)
    run.train()
    one.requires_grad_(True)
    run.optimizers = [run.optimizers[0], run.sgd(one)]
    run.train()


JOINING = {
    f.__name__: f
    for f in [
        unfrozen_later, unfrozen_layer_by_layer, a_whole_model_is_unfrozen, a_bystander_joins,
        a_bystander_joins_frozen_and_is_unfrozen, a_part_leaves_the_optimizer, a_second_optimizer_comes,
    ]
}  # fmt: skip


def joining(name: str, how: str, wrap: str, steps: int) -> Outcome:
    return told(JOINING[name], how, wrap, steps)


@pytest.mark.parametrize("name", JOINING)
def test_who_joins_later_is_trained(ranks, name):
    hold(ranks, 2, joining, [*product([name], HOWS[::2], WRAPS, [1, 3]), *product([name], HOWS[1::2], WRAPS, [3])])


def test_who_joins_later_is_trained_on_one_rank_too(ranks):
    hold(ranks, 1, joining, product(JOINING, ["accumulating"], ["bare"], [3]), only="exact")


# -- models that share --------------------------------------------------------------------------------------------


def sharing(run: Run) -> tuple[Net, Net]:
    one, two = backbone_and_head(run)
    two.body, two.inp, two.emb = one.body, one.inp, one.emb
    return one, two


def both_then_one_alone(run: Run) -> None:
    one, two = sharing(run)
    run.optimizer = run.sgd(one, two)
    for models in ([one, two], [two], [one], [one, two]):
        run.models = models
        run.train(1)


def one_alone_then_both(run: Run) -> None:
    one, two = sharing(run)
    run.optimizer = run.sgd(one, two)
    for models in ([one], [two], [one, two], [one]):
        run.models = models
        run.train(1)


def each_with_its_own_optimizer(run: Run) -> None:
    one, two = sharing(run)
    optimizers = [run.sgd(one), run.sgd(two)]
    for place in (0, 1, 0, 1):
        run.models, run.optimizer = [[one, two][place]], optimizers[place]
        run.train(1)


def the_first_is_dropped(run: Run) -> None:
    one, two = sharing(run)
    run.optimizer = run.sgd(one, two)
    run.train(1)
    run.models, run.model = [two], two
    run.optimizer = run.sgd(two)
    del one
    run.rewrap()
    gc.collect()
    run.train()


def in_another_order(run: Run) -> None:
    one, two = backbone_and_head(run)
    run.optimizer = run.sgd(one, two)
    run.train(1)
    run.optimizer = run.sgd(two, one)
    run.train(1)


SHARED = {
    f.__name__: f
    for f in [both_then_one_alone, one_alone_then_both, each_with_its_own_optimizer, the_first_is_dropped, in_another_order]
}


def shared(name: str, how: str, wrap: str, steps: int) -> Outcome:
    return told(SHARED[name], how, wrap, steps)


@pytest.mark.parametrize("name", SHARED)
def test_models_that_share_an_encoder_together_and_alone(ranks, name):
    hold(ranks, 2, shared, product([name], HOWS[::2], WRAPS, [1, 3]))
