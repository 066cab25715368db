"""No public name of `gradsync.functional` is right on one rank and silently wrong on two.

Each name is tried on two ranks in a case below, or it is of one rank by its meaning, and `OF_ONE_RANK` says why.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import GradSyncError
from gradsync import functional as F
from tests.support.compare import assert_equal_state
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch, states, window_mean

OF_ONE_RANK = {
    "numbers in, numbers out": {"correction", "sizes", "window_size", "Steps", "NonFinite", "Sync", "Tail", "ends_with_data"},
    "an iterable of this rank": {"length", "with_last"},
    "a loss of this rank": {"LossSum", "find_loss", "detach"},
    "objects of this rank, which must be called on each": {
        "GradientWatch", "owned", "bare_optimizer", "check_steppable", "discard", "is_scaling",
    },
}  # fmt: skip
TRIED = {
    "Run", "Terms", "Who", "Loop", "Closing", "Share", "Place", "Role", "Team", "Window", "weigh", "Boundary", "Held", "InParts",
    "Transport", "update", "Update", "normalise", "norm", "clip", "all_finite", "sync_gradients",
    "no_sync", "sync_every", "MicroStep", "fit", "Fitting", "rows_that_fit",
}  # fmt: skip


def test_each_name_is_here() -> None:
    assert set(F.__all__) == TRIED | set().union(*OF_ONE_RANK.values())


def expected(window: list[tuple[int, int]], lr: float = 0.1) -> dict:
    return states(small_model(), [window], window_mean, lr=lr)[-1]


def trained(wrap) -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
    inner = small_model()
    model = wrap(inner)
    return inner, model, torch.optim.SGD(model.parameters(), lr=0.1)


def bare(model):
    return model


# -- windows --------------------------------------------------------------------------------------------------------


def a_window_by_hand(wrap) -> None:
    """Run, Place, Closing, update: two micro-batches on one rank, one on the other, closed by flush on both."""
    inner, model, optimizer = trained(wrap)
    rank = dist.get_rank()
    run, who = F.Run("by hand", F.Terms(steps=3)), F.Who([model], [optimizer])
    for index in range(2 - rank):
        place = run.start(who)
        assert place == F.Place(0, index, 3, last=False, role=F.Role.RUNS)
        with run.holding(place):
            assert run.backward(place, mean_loss(model, micro_batch(rank, index))) is None
    assert isinstance(run.window, F.Window) and isinstance(run.fitting_team(), F.Team) and run.fitting_team().num_ranks == 2
    closing = run.flush()
    assert isinstance(closing, F.Closing) and [share.num_micro_batches for share in closing.shares] == [2.0, 1.0]
    assert isinstance(F.update([optimizer], factor=closing.factor), F.Update)
    run.close()
    assert run.flush() is None
    assert_equal_state(inner.state_dict(), expected([(0, 0), (0, 1), (1, 0)]), 1e-12)


def a_flush_after_different_windows() -> str:
    """A rank that has closed another number of windows: flush agrees on that by itself."""
    _, model, optimizer = trained(bare)
    run, who = F.Run("by hand", F.Terms(steps=2)), F.Who([model], [optimizer])
    run.go_on_from(dist.get_rank(), 0)
    place = run.start(who)
    with run.holding(place):
        run.backward(place, mean_loss(model, micro_batch(0, 0)))
    with pytest.raises(GradSyncError) as caught:
        run.flush()
    run.discard()
    return str(caught.value)


def two_runs_of_one_key() -> str:
    """A loop could not tell the other ranks which of the two it means."""
    models = [small_model(), small_model()]
    runs = [F.Run(name, F.Terms(steps=2)) for name in ("one", "two")]
    loop = F.Loop("by hand", 3, lambda: runs)
    with pytest.raises(GradSyncError) as caught:
        for index in loop.items(range(3)):
            for run, model in zip(runs, models):
                place = run.start(F.Who([model]), loop)
                with run.holding(place):
                    closing = run.backward(place, mean_loss(model, micro_batch(dist.get_rank(), index)))
                if closing is not None:
                    run.close()
    for run in runs:
        run.discard()
    return str(caught.value)


def a_loop_of_another_length() -> str:
    """A loop that was told of fewer items than come: the other ranks would not count on the rest."""
    model = small_model()
    run = F.Run("by hand", F.Terms(steps=2))
    loop = F.Loop("by hand", 2, lambda: [run])
    with pytest.raises(GradSyncError) as caught:
        for index in loop.items(iter(range(3))):
            place = run.start(F.Who([model]), loop)
            with run.holding(place):
                closing = run.backward(place, mean_loss(model, micro_batch(dist.get_rank(), index)))
            if closing is not None:
                run.close()
    return str(caught.value)


def parts_of_a_micro_batch(wrap) -> None:
    """InParts, which ends in the same closing as `run.backward`; so does a backward that is not run by it."""
    inner, model, optimizer = trained(wrap)
    rank = dist.get_rank()
    run, who, in_parts = F.Run("in parts", F.Terms(steps=2)), F.Who([model], [optimizer]), F.InParts(True, "in parts")
    for index in range(2):
        place = run.start(who)
        with run.holding(place):
            if index == rank:
                _, closing = in_parts.run(run, place, lambda x: mean_loss(model, x), (micro_batch(rank, index),), {})
                continue
            loss = mean_loss(model, micro_batch(rank, index))
            begun = run.begin(place, loss)
            assert isinstance(begun, F.Boundary | F.Held)
            with begun:
                for engine in begun.order.armed:
                    engine.arm(loss)
                tensor, seed = F.weigh(run.window, loss, None)
                tensor.backward(seed)
            closing = begun.closing
    F.update([optimizer], factor=closing.factor)
    run.close()
    assert_equal_state(inner.state_dict(), expected([(r, i) for r in range(2) for i in range(2)]), 1e-12)


def a_loop_of_sync_every(wrap) -> None:
    """sync_every with fit, on ranks of 3 and 1 items."""
    inner, model, optimizer = trained(wrap)
    rank = dist.get_rank()
    backward = F.fit(lambda x: mean_loss(model, x))
    for step, index in F.sync_every(model, 4, range(3 - 2 * rank)):
        assert isinstance(step, F.MicroStep) and isinstance(backward, F.Fitting)
        backward(step, micro_batch(rank, index))
        if step.last:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_state(inner.state_dict(), expected([(0, 0), (0, 1), (0, 2), (1, 0)]), 1e-12)


def held_and_then_synchronised(wrap) -> None:
    """no_sync and sync_gradients; a bare model, of which nothing could be held, is an error on every rank."""
    inner, model, optimizer = trained(wrap)
    rank = dist.get_rank()
    if wrap is bare:
        with pytest.raises(GradSyncError, match="model is bare"), F.no_sync(model):
            pass
        mean_loss(model, micro_batch(rank, 0)).backward()
    else:
        with F.no_sync(model):
            mean_loss(model, micro_batch(rank, 0)).backward()
    F.sync_gradients(model)
    F.update([optimizer])
    assert_equal_state(inner.state_dict(), expected([(0, 0), (1, 0)]), 1e-12)


def finite_of_a_rank_without_a_piece() -> list[bool]:
    """One number, which lies on rank 0: whether it is finite, both ranks hear."""
    model = FSDP(torch.nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"), use_orig_params=True)
    run, said = F.Run("by hand", F.Terms(steps=1)), []
    for number in (1.0, float("inf")):
        place = run.start(F.Who([model]))
        with run.holding(place):
            run.backward(place, model(torch.full((1, 1), number)).sum())
        run.close()
        said.append(F.all_finite(model.parameters(), spread=run.fitting_team().spread))
        model.zero_grad()
    return said


def test_a_rank_without_a_piece_of_the_gradients(ranks):
    assert ranks(2).run(finite_of_a_rank_without_a_piece) == [[True, False]] * 2


def the_most_rows() -> list[int]:
    """Over the ranks of the model's own group: of both, and of each alone, which may then ask for another number."""
    rank = dist.get_rank()
    found = []
    for group, most in ((None, 5), ([dist.new_group([r]) for r in range(2)][rank], 3 + rank)):
        model = DDP(small_model(), process_group=group)
        found.append(F.rows_that_fit(model, lambda rows: mean_loss(model, torch.ones(rows, 3).double()), most=most))
    return found


WRAPS = [bare, DDP]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(
    "case", [a_window_by_hand, parts_of_a_micro_batch, a_loop_of_sync_every, held_and_then_synchronised]
)
def test_a_window_is_exact(ranks, case, wrap) -> None:
    ranks(2).run(case, wrap)


def test_all_ranks_try_the_same_rows(ranks) -> None:
    assert ranks(2).run(the_most_rows) == [[5, 3], [5, 4]]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (a_flush_after_different_windows, "number of closed windows"),
        (two_runs_of_one_key, "key of its own"),
        (a_loop_of_another_length, "no more items than its length"),
    ],
)
def test_what_the_ranks_could_not_tell_apart_is_an_error(ranks, case, words) -> None:
    said = ranks(2).run(case)
    assert all(words in one for one in said), said


# -- gradients that lie in pieces ---------------------------------------------------------------------------------------


def norms_of_pieces(use_orig_params: bool) -> list[str]:
    """On FSDP1 each rank has a piece: with their ranks the norm is the whole model's, without them it is an error."""
    rank = dist.get_rank()
    whole = small_model()
    for r in range(2):
        (mean_loss(whole, micro_batch(r, 0)) / 2).backward()
    true = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    model = FSDP(small_model(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run, who = F.Run("pieces", F.Terms(steps=1)), F.Who([model], [optimizer])
    place = run.start(who)
    with run.holding(place):
        closing = run.backward(place, mean_loss(model, micro_batch(rank, 0)))
    run.close()
    parameters, spread = list(model.parameters()), run.fitting_team().spread
    assert torch.allclose(F.norm(parameters, spread=spread), true, rtol=1e-12)
    errors = []
    for call in (
        lambda: F.norm(parameters),
        lambda: F.clip(parameters, 1.0),
        lambda: F.all_finite(parameters),
        lambda: F.update([optimizer], clip_norm=1.0),
        lambda: F.update([optimizer], nonfinite="skip"),
        lambda: F.update([optimizer], scaler=torch.amp.GradScaler("cpu")),
    ):
        with pytest.raises(GradSyncError, match=r"spread=run\.fitting_team\(\)\.spread") as caught:
            call()
        errors.append(str(caught.value))
    F.normalise(parameters, closing.factor)  # element by element
    pieces = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    assert pieces, "each rank has some"
    if rank:
        pieces[0].fill_(torch.inf)
    assert not F.all_finite(parameters, spread=spread)
    made = F.update([optimizer], clip_norm=0.5, spread=spread, nonfinite="skip")
    assert not made.stepped
    return errors


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_norms_of_pieces(ranks, use_orig_params) -> None:
    ranks(2).run(norms_of_pieces, use_orig_params)
