"""A window that is saved in its middle goes on and ends as if nothing had been, on every engine."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync.engines import find
from tests.resume.engine_runs import NUM, Run, flush, over, resumed_anywhere
from tests.support.compare import assert_equal_states
from tests.support.homes import HOMES, home_of
from tests.support.models import net
from tests.support.reference import mean_of
from tests.support.training import DECAY, LR, data, reference

SHARDED = [name for name in HOMES if name.startswith(("fsdp", "hsdp", "replicate_fsdp"))]


FSDP1 = [name for name in HOMES if name.startswith("fsdp1")]


def of_engine(engine: str, loop, sync: str | None = None) -> None:
    # A static graph synchronises the first micro-batch that a fresh DDP runs, and so another one of the window.
    rounding = 1e-15 if engine == "ddp_static" else 0.0
    states = resumed_anywhere(lambda: home_of(engine), loop, sync, tolerance=rounding)
    assert_equal_states(states, reference(home_of(engine), [range(3), range(3, NUM)]))


@pytest.mark.parametrize("loop", [over, flush])
@pytest.mark.parametrize("engine", HOMES)
def test_a_window_is_resumed_after_any_micro_batch(ranks, engine, loop):
    """To the bit as it would have ended (but for a static graph), and within rounding as one process in float64 has it."""
    ranks(HOMES[engine][0]).run(of_engine, engine, loop)


@pytest.mark.parametrize("engine", SHARDED)
def test_a_window_that_synchronises_each_micro_batch_is_resumed(ranks, engine):
    """This rank's pieces of what is reduced already."""
    ranks(HOMES[engine][0]).run(of_engine, engine, flush, "each")


def used_only_early(engine: str, sync: str | None = None) -> None:
    """The second block not on the boundary, nor after a state that is saved before it; nothing moves what nobody uses."""

    def forward(model, rank, index):
        return model(data(rank, index), only_first=index % 3 > 0)

    states = resumed_anywhere(lambda: home_of(engine, unused=not engine.startswith("fsdp1")), flush, sync, forward)

    def weigh(model, items):
        return sum(mean_of(forward(model, *item)) for item in items) / len(items)

    home = home_of(engine, unused=not engine.startswith("fsdp1"))
    assert_equal_states(states, reference(home, [range(3), range(3, NUM)], weigh))


@pytest.mark.parametrize(
    ("engine", "sync"),
    [*((one, None) for one in SHARDED), *((one, "each") for one in FSDP1)],
)
def test_what_only_earlier_micro_batches_used_is_not_lost(ranks, engine, sync):
    """And what nobody used gets no gradient by being saved."""
    ranks(HOMES[engine][0]).run(used_only_early, engine, sync)


def asked_on_one_rank(engine: str) -> None:
    home = home_of(engine)
    run = Run(home)
    run.go(0, 3)
    before = run.step.state_dict()["windows"][0]["parameters"]
    for index in (3, 4):
        with torch.no_grad():
            home.model(data(home.rank, index))
        if dist.is_initialized() and dist.get_rank() == 0:
            state = run.step.state_dict()["windows"][0]
            assert state["parameters"] == before
            assert state["index"] == index - 3
        run.go(index, index + 1)
    run.go(5, 6)
    if not any("_flat_param" in name for name in before):
        assert set(before) == {name for name, _ in net().named_parameters()}
    assert_equal_states(run.states, reference(home, [range(3), range(3, 6)]))


@pytest.mark.parametrize("engine", HOMES)
def test_one_rank_alone_asks_for_a_state(ranks, engine):
    """After an evaluation, which may leave parameters gathered: it has their names, and no rank waits for that one."""
    ranks(HOMES[engine][0]).run(asked_on_one_rank, engine, limit=30)


def reduced_without_a_forward(engine: str) -> None:
    """What an engine is given to hold can be synchronised at once, by a model that has never run."""
    run, other = Run(home_of(engine)), home_of(engine)
    run.go(0, 2)
    (mine,), (its,) = find([run.home.model]), find([other.model])
    twin = dict(zip(mine.parameters, its.parameters))
    its.load_held({twin[p]: gradient.clone() for p, gradient in mine.held_gradients().items()})
    run.step.reset()
    assert its.num_held() or any(parameter.grad is not None for parameter in its.parameters)
    gradsync.sync_gradients(other.model)
    for p in other.model.parameters():
        if p.grad is not None:
            p.grad.mul_(3 / 2)
    torch.optim.SGD(other.model.parameters(), lr=LR, weight_decay=DECAY).step()
    assert_equal_states([other.full()], reference(other, [range(2)]))


@pytest.mark.parametrize(
    "engine", [*(one for one in FSDP1 if one != "fsdp1_no_root"), "fsdp2", "replicate_fsdp", "hsdp_window", "hsdp_shard"]
)
def test_what_was_loaded_is_reduced_without_a_forward(ranks, engine):
    ranks(HOMES[engine][0]).run(reduced_without_a_forward, engine)
