"""Participants that change between windows, and in the middle of one: exact, or an error on every rank."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

from gradsync import GradSyncError, accumulating
from tests.changes.rule import (
    LIMIT, Net, Outcome, Run, compare, exact_or_error, layer, my_rank, outcomes, sum_of_models, told, world_size,
)  # fmt: skip
from tests.reference import micro_batch

HOWS = ["accumulating", "accumulating anew", "sync_every", "sync_every anew"]


# -- edits of one model: trained, edited, trained on --------------------------------------------------------------


def new_head(run: Run) -> None:
    run.model.head = layer(5, 3)
    run.optimizer.add_param_group({"params": list(run.model.head.parameters())})


def new_head_and_optimizer(run: Run) -> None:
    run.model.head = layer(5, 3)
    run.optimizer = run.sgd(run.model)


def new_head_that_nobody_steps(run: Run) -> None:
    run.model.head = layer(5, 3)


def appended_layer(run: Run) -> None:
    run.model.body.append(layer(5, 5))
    run.optimizer.add_param_group({"params": list(run.model.body[-1].parameters())})


def layer_taken_out(run: Run) -> None:
    del run.model.body[2]


def layers_of_another_kind(run: Run) -> None:
    """As many parameters as before, of the same shapes: other objects."""
    run.model.body = nn.Sequential(layer(5, 5, seed=1), nn.Tanh(), layer(5, 5, seed=2), nn.Tanh())
    run.optimizer = run.sgd(run.model)


class Adapted(nn.Module):
    """What peft puts in a layer's place."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.down, self.up = inner, layer(5, 2), layer(2, 5)

    @property
    def weight(self):
        return self.inner.weight

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def adapter(run: Run) -> None:
    run.model.requires_grad_(False)
    run.model.body[0] = Adapted(run.model.body[0])
    run.optimizer.add_param_group({"params": [p for p in run.model.parameters() if p.requires_grad]})


def adapter_and_optimizer(run: Run) -> None:
    run.model.requires_grad_(False)
    run.model.body[0] = Adapted(run.model.body[0])
    run.optimizer = run.sgd([p for p in run.model.parameters() if p.requires_grad])


def weight_norm(run: Run) -> None:
    parametrizations.weight_norm(run.model.body[0])
    run.optimizer = run.sgd(run.model)


def weight_norm_of_which_the_optimizer_knows_half(run: Run) -> None:
    parametrizations.weight_norm(run.model.body[0])


def assigned(run: Run) -> None:
    run.model.load_state_dict({k: v.clone() for k, v in run.model.state_dict().items()}, assign=True)
    run.optimizer = run.sgd(run.model)


def assigned_behind_the_optimizer(run: Run) -> None:
    run.model.load_state_dict({k: v.clone() for k, v in run.model.state_dict().items()}, assign=True)


def other_storage(run: Run) -> None:
    """What `vector_to_parameters` and many meta-learners do."""
    for parameter in run.model.parameters():
        parameter.data = parameter.data.clone()


def taken_out_of_ddp(run: Run) -> None:
    run.unwrap()


def sub_module_alone(run: Run) -> None:
    """The backbone goes on under another head, the whole that it was part of is dropped."""
    other = Net(seed=3)
    other.body = run.model.body
    run.model, run.models = other, [other]
    run.optimizer = run.sgd(other)
    gc.collect()


def sub_module_alone_bare(run: Run) -> None:
    sub_module_alone(run)
    run.unwrap()


def in_float32(run: Run) -> None:
    run.model.float()


def in_float32_and_optimizer(run: Run) -> None:
    run.model.float()
    run.optimizer = run.sgd(run.model)


def resized_embedding(run: Run) -> None:
    old = run.model.emb.weight
    torch.manual_seed(5)
    run.model.emb = nn.Embedding(6, 5).double()
    with torch.no_grad():
        run.model.emb.weight[:4] = old
    run.optimizer = run.sgd(run.model)


def resized_in_place(run: Run) -> None:
    """What transformers do: the parameter stays, its shape is another."""
    torch.manual_seed(5)
    run.model.emb.weight.data = torch.cat([run.model.emb.weight.data, torch.randn(2, 5).double()])
    run.model.emb.num_embeddings = 6


def frozen(run: Run) -> None:
    run.model.body.requires_grad_(False)


def frozen_and_back(run: Run) -> None:
    frozen(run)
    run.train()
    run.model.body.requires_grad_(True)


def swapped(run: Run) -> None:
    """Two layers of one size: the same number of parameters and of elements as before."""
    run.model.body[0].requires_grad_(False)
    run.train(1)
    run.model.body[0].requires_grad_(True)
    run.model.body[2].requires_grad_(False)


def tied(run: Run) -> None:
    run.model.body[2].weight = run.model.body[0].weight


def tied_and_untied(run: Run) -> None:
    tied(run)
    run.train()
    run.model.body[2].weight = nn.Parameter(run.model.body[0].weight.detach().clone())
    run.optimizer = run.sgd(run.model)


def part_of_something_larger(run: Run) -> None:
    """The model that was trained alone is a layer of another now."""
    larger = nn.Sequential(run.model, layer(2, 2))
    run.models, run.optimizer = [larger], run.sgd(larger)


def only_a_part(run: Run) -> None:
    smaller = nn.Sequential(run.model.inp, run.model.body)
    run.models, run.optimizer = [smaller], run.sgd(smaller)


def copied(run: Run) -> None:
    run.model = copy.deepcopy(run.model)
    run.models, run.optimizer = [run.model], run.sgd(run.model)


def optimizer_of_a_part(run: Run) -> None:
    run.optimizer = run.sgd(run.model.head)


EDITS = [
    new_head, new_head_and_optimizer, new_head_that_nobody_steps, appended_layer, layer_taken_out, layers_of_another_kind,
    adapter, adapter_and_optimizer, weight_norm, weight_norm_of_which_the_optimizer_knows_half, assigned,
    assigned_behind_the_optimizer, other_storage, taken_out_of_ddp, sub_module_alone, sub_module_alone_bare, in_float32,
    in_float32_and_optimizer, resized_embedding, resized_in_place, frozen, frozen_and_back, swapped, tied, tied_and_untied,
    part_of_something_larger, only_a_part, copied, optimizer_of_a_part,
]  # fmt: skip
BY_NAME = {edit.__name__: edit for edit in EDITS}
ROUGH = {"in_float32", "in_float32_and_optimizer"}


def tolerance(name: str) -> float:
    return 1e-5 if name in ROUGH else 1e-10


def edited(name: str, how: str, wrap: str, steps: int, rewrapped: bool = False) -> Outcome:
    def story(run: Run) -> None:
        run.train()
        BY_NAME[name](run)
        if rewrapped:
            run.rewrap()
        run.train()

    return told(story, how, wrap, steps, tolerance(name))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_model_that_was_edited_between_windows(ranks, name, wrap, how, steps):
    exact_or_error(ranks(2).run(edited, name, how, wrap, steps, limit=LIMIT))


@pytest.mark.parametrize("how", ["accumulating", "sync_every"])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_user_who_puts_the_edited_model_on_ddp_anew(ranks, name, how):
    """That is what torch asks for, and nothing about it is wrong."""
    # These train in the middle of the edit, or leave the optimizer, or torch's own graph, with what is gone.
    open_ = {"new_head_that_nobody_steps", "assigned_behind_the_optimizer", "resized_in_place", "frozen_and_back", "swapped",
             "tied_and_untied"}  # fmt: skip
    exact_or_error(ranks(2).run(edited, name, how, "ddp", 3, True, limit=LIMIT), only="" if name in open_ else "exact")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", BY_NAME)
def test_on_one_rank_an_edit_is_harmless(ranks, name, how):
    known = "behind" in name or "half" in name or "nobody" in name  # the optimizer misses what is trained: may be said
    exact_or_error(outcomes(ranks, 1, edited, name, how, "bare", 3), only="" if known else "exact")


def edited_twice(names: list[str], how: str, wrap: str) -> Outcome:
    """Errors are not remembered, nor is what was exact: every edit after every other."""

    def story(run: Run) -> None:
        run.train(1)
        for name in names:
            BY_NAME[name](run)
            run.train(1)

    return told(story, how, wrap, 2)


@pytest.mark.parametrize("how", ["accumulating", "sync_every anew"])
@pytest.mark.parametrize("names", [
    ["new_head", "appended_layer", "layer_taken_out", "weight_norm", "copied"],
    ["swapped", "frozen_and_back", "assigned", "tied", "frozen"],
    ["resized_embedding", "adapter", "part_of_something_larger"],
])  # fmt: skip
def test_many_edits_of_one_run(ranks, names, how):
    exact_or_error(ranks(2).run(edited_twice, names, how, "bare", limit=LIMIT))


def edited_on_one_rank(name: str, how: str, wrap: str) -> Outcome:
    def story(run: Run) -> None:
        run.train(1)
        if my_rank() == 1:
            BY_NAME[name](run)
        run.train(2)

    return told(story, how, wrap, 2)


@pytest.mark.parametrize("how", ["accumulating", "sync_every"])
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
@pytest.mark.parametrize("name", ["new_head", "appended_layer", "frozen", "in_float32", "resized_embedding"])
def test_an_edit_on_one_rank_alone_is_an_error_on_both(ranks, name, wrap, how):
    exact_or_error(ranks(2).run(edited_on_one_rank, name, how, wrap, limit=LIMIT), only="error")


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


def backbone_and_head(run: Run) -> tuple[Net, Net]:
    one, two = run.model, Net(seed=9)
    run.models = [one, two]
    return one, two


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


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
@pytest.mark.parametrize("name", JOINING)
def test_who_joins_later_is_trained(ranks, name, wrap, how, steps):
    exact_or_error(ranks(2).run(joining, name, how, wrap, steps, limit=LIMIT))


@pytest.mark.parametrize("name", JOINING)
def test_who_joins_later_is_trained_on_one_rank_too(ranks, name):
    exact_or_error(outcomes(ranks, 1, joining, name, "accumulating", "bare", 3), only="exact")


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


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("how", ["accumulating", "sync_every"])
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
@pytest.mark.parametrize("name", SHARED)
def test_models_that_share_an_encoder_together_and_alone(ranks, name, wrap, how, steps):
    exact_or_error(ranks(2).run(shared, name, how, wrap, steps, limit=LIMIT))


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


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("how", ["accumulating", "accumulating anew"])
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_the_optimizers_step_and_no_model_has(ranks, name, wrap, how, steps):
    exact_or_error(ranks(2).run(outside, name, how, wrap, steps, limit=LIMIT), says="parameter|optimizer")


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_no_model_has_is_trained_on_one_rank(ranks, name):
    exact_or_error(outcomes(ranks, 1, outside, name, "accumulating", "bare", 3), only="exact")


def left_out(wrap: str, steps: int) -> Outcome:
    """Two models in the call and in the optimizer, `model=` names the first."""

    def story(run: Run) -> None:
        one, two = backbone_and_head(run)
        run.optimizer = run.sgd(one, two)
        run.train()

    return told(story, "accumulating", wrap, steps, model=lambda one, *_: one)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_a_model_that_model_leaves_out(ranks, wrap, steps):
    exact_or_error(ranks(2).run(left_out, wrap, steps, limit=LIMIT))
    exact_or_error([left_out("bare", steps)])


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
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_optimizers_made_anew_many_times(ranks, wrap, steps, size):
    exact_or_error(outcomes(ranks, size, optimizers_made_anew, wrap, steps), only="exact")


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
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_models_made_anew_many_times(ranks, wrap, size):
    exact_or_error(outcomes(ranks, size, models_made_anew, wrap), only="exact")


# -- edits in the middle of a window ------------------------------------------------------------------------------


def unfreeze(run: Run) -> None:
    run.model.body.requires_grad_(True)


MIDDLE = {
    "new_head": new_head, "appended_layer": appended_layer, "frozen": frozen, "in_float32": in_float32, "assigned": assigned,
    "resized_embedding": resized_embedding, "weight_norm": weight_norm, "unfrozen": unfreeze,
}  # fmt: skip


def edited_in_the_middle(name: str, how: str, wrap: str, at: int) -> Outcome:
    """The window in which the edit falls is refused; what had been held is gone with it."""

    def story(run: Run) -> None:
        if name == "unfrozen":
            frozen(run)
        run.train(1)
        for _ in range(at):
            run.micro()
        MIDDLE[name](run)
        for _ in range(run.steps - at):
            run.micro()
        run.train(1)

    return told(story, how, wrap, 3)


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("how", ["accumulating", "sync_every"])
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
@pytest.mark.parametrize("name", MIDDLE)
def test_an_edit_in_the_middle_of_a_window(ranks, name, wrap, how, at):
    says = "window|middle" if how == "accumulating" else ""
    only = "error" if how == "accumulating" else ""
    exact_or_error(ranks(2).run(edited_in_the_middle, name, how, wrap, at, limit=LIMIT), says=says, only=only)


def toggled_between_calls(how: str, wrap: str, steps: int) -> Outcome:
    """Off and on again between two calls of a window: no call sees it."""

    def story(run: Run) -> None:
        for _ in range(3 * steps):
            run.model.body.requires_grad_(False)
            run.model.body.requires_grad_(True)
            run.micro()

    return told(story, how, wrap, steps)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("how", ["accumulating", "sync_every"])
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_what_no_call_sees_is_no_change(ranks, wrap, how, steps):
    exact_or_error(ranks(2).run(toggled_between_calls, how, wrap, steps, limit=LIMIT), only="exact")


def gan(wrap: str, toggles: str, steps: int) -> Outcome:
    """Two functions in turn, each call toggling the halves, as the tutorials do: two windows are open at a time."""
    seen, right = [], []
    for ours in (False, True):
        run = Run("reference", wrap, steps)
        g, d = run.model, layer(2, 1)
        og, od = run.sgd(g), run.sgd(d)

        def d_loss(g, d, x):
            return d(g(x)).square().mean()

        def g_loss(g, d, x):
            return -d(g(x)).mean()

        d_step = accumulating(steps=steps)(lambda g, d, optimizer, x: d_loss(g, d, x))
        g_step = accumulating(steps=steps)(lambda g, d, optimizer, x: g_loss(g, d, x))
        homes = [run._home(g), run._home(d)] if ours else [g, d]
        held = {False: [], True: []}
        for i in range(3 * steps):
            for turn, (mine, other, optimizer) in enumerate([(d, g, od), (g, d, og)]):
                if toggles == "both":
                    mine.requires_grad_(True)
                    other.requires_grad_(False)
                elif toggles == "d off and on" and turn == 1:
                    d.requires_grad_(False)
                loss = (d_loss, g_loss)[turn]
                if ours:
                    (d_step, g_step)[turn](*homes, optimizer, micro_batch(my_rank(), i))
                else:
                    parameters = list(mine.parameters())
                    for rank in range(world_size()):
                        total = loss(g, d, micro_batch(rank, i)) / (world_size() * steps)
                        held[bool(turn)].append(torch.autograd.grad(total, parameters))
                    if i % steps == steps - 1:
                        for p, *grads in zip(parameters, *held[bool(turn)]):
                            p.grad = sum(grads)
                        held[bool(turn)].clear()
                        optimizer.step()
                        optimizer.zero_grad()
                if toggles == "d off and on" and turn == 1:
                    d.requires_grad_(True)
            if i % steps == steps - 1:
                snapshot = {n: p.detach().clone() for m in (g, d) for n, p in m.named_parameters()}
                (seen if ours else right).append(snapshot)
    compare(seen, right)
    return Outcome("exact")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("toggles", ["none", "both", "d off and on"])
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_a_gan_that_toggles_requires_grad_between_calls(ranks, wrap, toggles, steps, size):
    """What every GAN loop does: no change of participants, bare or on DDP."""
    exact_or_error(outcomes(ranks, size, gan, wrap, toggles, steps), only="exact")


# -- reset, exceptions and the state see what is there now --------------------------------------------------------


def after_an_edit(name: str, wrap: str, what: str) -> Outcome:
    """Half a window after the edit is given up; nothing of it stays, and the next window is exact."""
    dropped = {}

    def story(run: Run) -> None:
        run.train(1)
        BY_NAME[name](run)
        run.train(1)
        if run.how != "reference":  # the reference never has the half window
            before = run.drawn
            run.micro()
            if what == "reset":
                run._step.reset()
            else:
                loss, run.loss = run.loss, None
                try:
                    run.micro()
                except TypeError:
                    run.loss = loss
            left = [n for n, p in run.tracked().items() if p.grad is not None]
            assert not left, f"{what} left gradients of {left}"
            run.drawn = before
            dropped[what] = True
        run.train(2)

    return told(story, "accumulating", wrap, 3)


@pytest.mark.parametrize("what", ["reset", "exception"])
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
@pytest.mark.parametrize("name", ["new_head", "appended_layer", "assigned", "frozen_and_back", "weight_norm"])
def test_reset_and_exceptions_know_the_parameters_of_now(ranks, name, wrap, what):
    exact_or_error(ranks(2).run(after_an_edit, name, wrap, what, limit=LIMIT))


def reset_on_one(name: str, what: str) -> Outcome:
    return after_an_edit(name, "bare", what)


@pytest.mark.parametrize("what", ["reset", "exception"])
@pytest.mark.parametrize("name", ["new_head", "appended_layer", "assigned", "frozen_and_back"])
def test_reset_and_exceptions_on_one_rank(name, what):
    exact_or_error([reset_on_one(name, what)], only="exact")


def saved_after_an_edit(name: str, wrap: str) -> Outcome:
    """A mid-window state after the edit is loaded into a run that had no edit: the same numbers."""

    def story(run: Run) -> None:
        run.train(1)
        BY_NAME[name](run)
        run.train(1)
        run.micro()
        if run.how != "reference":
            state = run._step.state_dict()
            run._step.reset()
            run.rewrap()
            run._step = run._function()
            run._step.load_state_dict(state)
        run.micro()
        run.micro()
        run.train(1)

    return told(story, "accumulating", wrap, 3)


@pytest.mark.parametrize("wrap", ["bare", "ddp"])
@pytest.mark.parametrize("name", ["new_head", "appended_layer", "assigned", "frozen_and_back", "weight_norm", "adapter"])
def test_the_state_knows_the_parameters_of_now(ranks, name, wrap):
    exact_or_error(ranks(2).run(saved_after_an_edit, name, wrap, limit=LIMIT))


@pytest.mark.parametrize("name", ["new_head", "appended_layer", "assigned", "frozen_and_back", "adapter"])
def test_the_state_after_an_edit_on_one_rank(name):
    exact_or_error([saved_after_an_edit(name, "bare")], only="exact")


def goes_on_after_the_error(wrap: str) -> list[str]:
    """Where an edit is refused, what the error advises helps: DDP anew, or another function, and everything is exact."""
    run, reference = Run("accumulating", wrap, 2), Run("reference", wrap, 2)
    said = []
    for one in (reference, run):
        one.train(1)
        new_head_and_optimizer(one)
        try:
            one.train(1)
        except GradSyncError as error:
            said.append(str(error))
            one.drawn = 2
            one.rewrap()
            one.train(1)
        one.train(1)
    compare(run.trace, reference.trace)
    dist.barrier()
    return said


@pytest.mark.parametrize("wrap", ["bare", "ddp"])
def test_after_the_error_what_it_advises_helps(ranks, wrap):
    said = ranks(2).run(goes_on_after_the_error, wrap, limit=LIMIT)
    assert bool(said[0]) == bool(said[1]), said
