"""A state holds whole gradients, by the names in the user's model."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    fully_shard,
)  # fmt: skip
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync.decorator.checkpoint import names_without_wrappers
from tests.resume.engine_runs import Run
from tests.support.compare import assert_equal_states
from tests.support.files import is_plain
from tests.support.homes import HOMES, Home, home_of
from tests.support.models import net
from tests.support.reference import mean_of
from tests.support.training import data, reference

FSDP1 = [name for name in HOMES if name.startswith("fsdp1")]


def whole_by_name(engine: str) -> None:
    """What a state holds is what this rank's micro-batches give to a bare model, each by its name there.

    Without `use_orig_params` FSDP1 has no parameters but the flat ones, by whose names it is then.
    """
    home = home_of(engine)
    run = Run(home, "window")
    run.go(0, 2)
    bare = net()
    sum(mean_of(bare(data(home.rank, index))) / 3 for index in range(2)).backward()
    expected = {name: p.grad for name, p in bare.named_parameters()}
    if any("_flat_param" in name for name, _ in home.model.named_parameters()):
        parts = {
            "_flat_param": [bare.scale],
            "first._flat_param": bare.first.parameters(),
            "second._flat_param": bare.second.parameters(),
        }
        expected = {name: torch.cat([p.grad.flatten() for p in part]) for name, part in parts.items()}
    assert is_plain(run.step.state_dict())
    assert_equal_states([run.gradients], [expected], 1e-14)
    state = run.taken()
    run.step.load_state_dict(state)  # into what is alive
    assert run.step.progress.index == 2
    assert_equal_states([run.gradients], [state["windows"][0]["open"]["gradients"]], 0.0)
    again = Run(home_of(engine), "window")
    again.step.load_state_dict(state)
    for one in (run, again):
        one.go(2, 3)
    assert_equal_states(run.states, again.states, 0.0)
    assert_equal_states(run.states, reference(home, [range(3)]))


@pytest.mark.parametrize("engine", ["bare", "replicate_fsdp", *FSDP1, "fsdp2", "hsdp_window"])
def test_a_state_holds_whole_gradients_by_name(ranks, engine):
    """As plain tensors, which a live function takes back as well."""
    ranks(HOMES[engine][0]).run(whole_by_name, engine)


def names_in_wrappers() -> None:
    def fsdp1(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

    def wrapped(model):
        model.first = checkpoint_wrapper(model.first)
        model.second.up = torch.compile(model.second.up, backend="eager")
        return model

    def gradients(wrap):
        run = Run(Home(wrap(net()), dist.get_rank(), 2))
        run.go(0, 2)
        return run.taken()["windows"][0]["open"]["gradients"]

    expected = gradients(lambda model: model)
    assert set(expected) == {name for name, _ in net().named_parameters()}
    for wrap in (lambda model: model, DDP, fully_shard, fsdp1, lambda model: torch.compile(model, backend="eager")):
        assert_equal_states([gradients(lambda model, wrap=wrap: wrap(wrapped(model)))], [expected])


def test_a_state_goes_by_the_names_in_the_users_model(ranks):
    """Whatever wraps it, and the modules in it."""
    ranks(2).run(names_in_wrappers)


def test_two_parameters_never_have_one_name():
    """Where they would, without their wrappers, both keep what they have."""
    names = ["a._orig_mod.b", "a.b", "_fsdp_wrapped_module.c", "my_orig_mod.d", "e._orig_mod", "f._checkpoint_wrapped_module.g"]
    assert list(names_without_wrappers(names).values()) == ["a._orig_mod.b", "a.b", "c", "my_orig_mod.d", "e._orig_mod", "f.g"]
