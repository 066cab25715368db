"""States under sync="shard", which hold pieces, and states that go on under another sync."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradsync
from tests.resume.engine_runs import Run, flush, resumed_anywhere, updates
from tests.support.compare import assert_equal_states
from tests.support.files import is_plain
from tests.support.homes import HOMES, Home, home_of, mesh
from tests.support.models import Choosy, net
from tests.support.reference import mean_of, micro_batch
from tests.support.training import data, reference

FSDP1 = [name for name in HOMES if name.startswith("fsdp1")]


def parts_of_an_hsdp_mesh() -> None:
    """Under sync="shard" a state holds this rank's piece of each sum over its shard group, one dimension more."""
    home = home_of("hsdp_shard")
    run = Run(home)
    run.go(0, 2)
    assert is_plain(run.step.state_dict())
    bare = net()
    place = mesh((2, 2), ("replicas", "shards"))
    others = [rank for rank in range(4) if rank // 2 == home.rank // 2]
    sum(mean_of(bare(data(rank, index))) / 3 for rank in others for index in range(2)).backward()
    for name, p in bare.named_parameters():
        piece = run.gradients[name]
        mine = p.grad.chunk(2)[place.get_local_rank("shards")]
        assert piece.shape == (1, *mine.shape), name
        ratio = (piece[0] / mine)[mine != 0]  # torch divides by something before it adds up, and by the rest after
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-10, atol=0)
    run.step.reset()


def test_under_shard_a_state_holds_a_piece_of_each(ranks):
    """Of the sum over the ranks that share the shards."""
    ranks(4).run(parts_of_an_hsdp_mesh)


def who_used_what() -> None:
    """Is not forgotten: what no rank used has no gradient, and what one used and gave zeros has one, as weight decay shows."""

    def make():
        model = Choosy()
        for one in (model.first_rank_first_time, model):
            fully_shard(one, mesh=mesh((2, 2), ("replicas", "shards")))
        return Home(model, dist.get_rank(), 4, {"sync": "shard"})

    def forward(model, rank, index):
        return model(data(rank, index), rank, index)

    states = resumed_anywhere(make, flush, forward=forward)
    assert_equal_states(states, updates(Choosy(), lambda *item: mean_of(forward(*item)), 4))
    assert torch.equal(states[-1]["nobody"], torch.ones(5, dtype=torch.float64))
    assert states[0]["last_rank_zeros"].max() < 1
    run = Run(make(), forward=forward)
    run.go(0, 1)
    state = run.taken()
    run.step.load_state_dict(state)
    run.step.flush()  # with what was loaded alone: every rank reduces what any of them has used
    assert_equal_states(run.states, updates(Choosy(), lambda *item: mean_of(forward(*item)), 4, [range(1)]))


def test_which_parameters_were_used_is_not_forgotten(ranks):
    """By some rank or by none, and with a gradient of zeros."""
    ranks(4).run(who_used_what)


def other_shards() -> None:
    """A piece that was saved on another mesh is refused, whatever the number of ranks."""
    run = Run(home_of("hsdp_shard"))
    run.go(0, 1)
    state = run.taken()
    model = net()
    for one in (model.first, model.second, model):
        fully_shard(one, mesh=mesh((1, 4), ("replicas", "shards")))
    other = Run(Home(model, dist.get_rank(), 4, {"sync": "shard"}))
    other.step.load_state_dict(state)
    with pytest.raises(gradsync.GradSyncError, match=r"shape \[2\] where this rank's shard is of shape \[1\]. Use the same mesh"):
        other.step(1)


def test_a_piece_of_another_shard_is_refused(ranks):
    ranks(4).run(other_shards)


def another_sync(engine: str, before: str, after: str) -> None:
    """What is saved under one is gone on with under another; it cannot be saved again until the boundary."""
    unused = engine.startswith("hsdp")

    def forward(model, rank, index):  # the second block only before the state is saved
        return model(data(rank, index), only_first=index % 3 > 0)

    def weigh(model, items):
        return sum(mean_of(forward(model, *item)) for item in items) / len(items)

    run = Run(home_of(engine, unused=unused), before, forward=forward)
    run.go(0, 4)
    state = run.taken()
    again = Run(home_of(engine, unused=unused), after, run.home.model.parameters(), forward)
    again.step.load_state_dict(state)
    again.go(4, 6)
    assert_equal_states(run.states + again.states, reference(run.home, [range(3), range(3, 6)], weigh))
    odd = Run(home_of(engine, unused=unused), after)
    odd.step.load_state_dict(state)
    odd.go(4, 5)
    if before == "window" or (before, after) == ("shard", "each"):  # all that was held has come into the one form
        odd.step.state_dict()
    else:
        with pytest.raises(gradsync.GradSyncError, match="so that there are two. Save at a boundary, where progress.index is 0"):
            odd.step.state_dict()
    odd.step.reset()
    odd.go(0, 3)


@pytest.mark.parametrize(
    ("engine", "before", "after"),
    [
        *(("hsdp_window", a, b) for a in ("window", "shard", "each") for b in ("window", "shard", "each") if a != b),
        *((one, *pair) for one in ("fsdp1_full", "fsdp1_full_orig", "fsdp2") for pair in (("window", "each"), ("each", "window"))),
    ],
)  # fmt: skip
def test_a_state_of_another_sync(ranks, engine, before, after):
    """Is gone on with; while it is mixed, saving it is an error."""
    ranks(HOMES[engine][0]).run(another_sync, engine, before, after)


def saved_where_it_is_a_bystander(sync: str, saves: bool) -> list:
    """A generator on HSDP, whose open window is saved and loaded behind a call of the judge's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    maker, judge = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
    for model in (maker, judge):
        fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (maker, judge)]
    make = gradsync.accumulating(3, optimizer=optimizers[0], sync=sync)(lambda maker, judge, x: (judge(maker(x)) - 1).square().mean())
    judges = gradsync.accumulating(2, optimizer=optimizers[1], sync=sync)(lambda maker, judge, x: judge(maker(x)).square().mean())
    for index in range(6):
        make(maker, judge, micro_batch(dist.get_rank(), index))
        judges(maker, judge, micro_batch(dist.get_rank(), index))
        if saves:
            state = copy.deepcopy(make.state_dict())
            make.reset()
            make.load_state_dict(state)
    return [parameter.full_tensor().tolist() for model in (maker, judge) for parameter in model.parameters()]


@pytest.mark.parametrize("sync", ["window", "shard", "each"])
def test_a_window_is_saved_behind_a_call_that_has_the_model_as_a_bystander(ranks, sync):
    """The pieces of a window with sync="shard" were lost: the unsharded parameters were still switched off."""
    saved, plain = (ranks(4).run(saved_where_it_is_a_bystander, sync, saves) for saves in (True, False))
    for came, expected in zip(saved, plain, strict=True):
        for one, other in zip(came, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-12, atol=1e-12)
