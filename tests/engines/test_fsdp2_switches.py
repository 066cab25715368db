"""FSDP2's switches and held gradients are left as they were found."""

from __future__ import annotations

import contextlib

import pytest
import torch

import gradsync
from gradsync.engines import find
from tests.support.compare import assert_equal_states
from tests.support.homes import Home, home_of
from tests.support.reference import mean_of
from tests.support.training import DECAY, LR, Run, data, reference


def held(home: Home) -> list[str]:
    """Where FSDP2 still keeps gradients."""
    found = [name for name, p in home.model.named_parameters() if p.grad is not None]
    for engine in find([home.model]):
        for group in getattr(engine, "_groups", ()):
            if group._partial_reduce_output is not None:
                found.append("partial")
            for p in group.fsdp_params:
                if p.unsharded_accumulated_grad is not None or (
                    hasattr(p, "_unsharded_param") and p._unsharded_param.grad is not None
                ):
                    found.append(held)
    return found


def flags(home: Home) -> list[tuple]:
    names = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "reduce_scatter_unused_params")
    return [
        tuple(getattr(group, name) for name in names) for engine in find([home.model]) for group in engine._groups
    ]


def switches_are_put_back(engine: str) -> None:
    home = home_of(engine)
    home.model.second.set_requires_gradient_sync(False)  # whatever their user had set
    home.model.first.set_reshard_after_backward(False)
    before = flags(home)
    run = Run(home)
    for index in range(4):
        run(index)
        assert flags(home) == before
    run.explode = 4
    with pytest.raises(KeyError):
        run(4)
    assert flags(home) == before
    with gradsync.no_sync(home.model):
        held_back = flags(home)
        assert not any(reduce for reduce, *_ in held_back)
        with contextlib.suppress(KeyError), gradsync.no_sync(home.model.second, home.model):
            raise KeyError
        assert flags(home) == held_back
    assert flags(home) == before
    micro = gradsync.sync_every(home.model, 2)
    next(micro)
    micro.close()
    assert flags(home) == before


def discarding_leaves_nothing(engine: str) -> None:
    home = home_of(engine)
    run = Run(home)
    for index in (0, 1):
        run(index)
    assert held(home)
    home.model.zero_grad()
    run.step.reset()
    assert not held(home)
    for index in (0, 1):
        run(index)
    run.explode = 2
    with pytest.raises(KeyError):
        run(2)
    assert not held(home)
    dropping = Run(home, tail="drop")
    dropping.over(2)
    assert not held(home)


FSDP2 = ["fsdp2", "fsdp2_gathered", "replicate_fsdp"]


@pytest.mark.parametrize(("engine", "size"), [*((one, 2) for one in FSDP2), ("hsdp_window", 4), ("hsdp_shard", 4)])
@pytest.mark.parametrize("case", [switches_are_put_back, discarding_leaves_nothing])
def test_fsdp2_is_left_as_it_was_found(ranks, engine, size, case):
    """Its switches whatever their user had set, nested, and after exceptions; and no gradient inside it."""
    ranks(size).run(case, engine)


def held_gradients_can_be_taken_and_put_back(engine: str) -> None:
    """Into a model that has run no forward yet, too; a flush may follow at once."""
    home, fresh = home_of(engine), home_of(engine)
    run = Run(home)
    for index in range(2):
        run(index)
    (engine_of_home,), (engine_of_fresh,) = find([home.model]), find([fresh.model])
    held = [gradient.clone() for gradient in engine_of_home.held_gradients().values()]
    assert len(held) == len(list(fresh.model.parameters()))
    assert all(h.shape == p.shape for h, p in zip(held, fresh.model.parameters()))
    optimizer = torch.optim.SGD(fresh.model.parameters(), lr=LR, weight_decay=DECAY)
    engine_of_fresh.load_held(dict(zip(engine_of_fresh.parameters, held)))
    gradsync.sync_gradients(fresh.model)
    for p in fresh.model.parameters():
        p.grad.mul_(3 / 2)
    optimizer.step()
    assert_equal_states([fresh.full()], reference(fresh, [range(2)]))
    engine_of_home.discard()
    engine_of_home.load_held(dict(zip(engine_of_home.parameters, held)))
    run(2)
    assert_equal_states(run.states, reference(home, [range(3)]))


@pytest.mark.parametrize("engine", ["fsdp2", "replicate_fsdp"])
def test_held_gradients_can_be_taken_and_put_back(ranks, engine):
    """Whole, by parameter: what a state in the middle of a window needs."""
    ranks(2).run(held_gradients_can_be_taken_and_put_back, engine)


def a_part_of_a_model() -> None:
    """`sync_gradients` of one block leaves what the others hold."""
    home = home_of("fsdp2")
    with gradsync.no_sync(home.model):
        mean_of(home.model(data(home.rank, 0))).backward()
    gradsync.sync_gradients(home.model.first)
    synchronised = {name for name, p in home.model.named_parameters() if p.grad is not None}
    assert synchronised == {f"first.{name}" for name, _ in home.model.first.named_parameters()}
    gradsync.sync_gradients(home.model)
    assert all(p.grad is not None for p in home.model.parameters())


def test_a_part_of_a_model(ranks):
    ranks(2).run(a_part_of_a_model)
