"""Micro-batches that fail on some rank, in the body or in a backward: every rank goes on alike."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import GradSyncError, accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.traps import Trap


def failing_backward(where: int, fails: list) -> None:
    """A backward that fails at the boundary completes its collectives; the next window is right on every rank."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, DDP):
        model = small_model()
        home = wrap(model)
        optimizer = Recorder(model.parameters(), lr=0.0)

        @accumulating(steps=2)
        def step(model, optimizer, x, armed):
            inner = model.module if isinstance(model, DDP) else model
            y = inner[0](Trap.apply(x.requires_grad_(), ZeroDivisionError() if armed and where == 2 else None))
            y = Trap.apply(y, ZeroDivisionError() if armed and where == 0 else None)
            y = inner[2](inner[1](y))
            return Trap.apply(y, ZeroDivisionError() if armed and where == 1 else None).square().mean()

        for attempt in range(4):
            for i in range(2):
                try:
                    step(home, optimizer, micro_batch(rank, i), rank == 1 and attempt in fails and i == 1)
                except ZeroDivisionError:
                    assert all(p.grad is None for p in model.parameters())
        twin = small_model()
        loss = sum(twin(micro_batch(r, i)).square().mean() for r in range(2) for i in range(2)) / 4
        expected = [list(torch.autograd.grad(loss, list(twin.parameters())))]
        assert_equal_updates(optimizer.seen[-2:], expected * 2)


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("fails", [[0], [1], [0, 1]])
def test_a_failing_boundary_completes_its_collectives(ranks, where, fails):
    """It fails in the middle, at the very first gradient, or after the last; before buckets are ordered, and after."""
    ranks(2).run(failing_backward, where, fails)


def skipping(bad: list, looped: bool, sync: str) -> None:
    """One rank drops micro-batches, the boundary's among them; the mean is over what remained."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, DDP):
        model = small_model()
        home = wrap(model)
        optimizer = Recorder(model.parameters())

        @accumulating(steps=3, skip=ValueError, sync=sync)
        def step(model, optimizer, i):
            if [rank, i] in bad:
                raise ValueError
            return mean_loss(model, micro_batch(rank, i))

        for i in step.over(range(8)) if looped else range(8):
            step(home, optimizer, i)
        step.flush()
        windows = [[(r, i) for r, i in w if [r, i] not in bad] for w in cut([8, 8], 3)]
        expected, _ = train(small_model(), [w for w in windows if w], window_mean)
        assert_equal_updates(optimizer.seen, expected)
        assert step.progress.dropped == sum(r == rank for r, _ in bad)


SKIPPED = [
    [[0, 1]],
    [[1, 2]],
    [[0, 2], [1, 5]],
    [[0, 0], [0, 1], [0, 2]],
    [[1, 3], [1, 4], [1, 5]],
    [[1, 7]],
    [[0, 6], [0, 7]],
]


@pytest.mark.parametrize("sync", ["window", "each"])
@pytest.mark.parametrize("bad", SKIPPED)
def test_skipped_micro_batches(ranks, bad, sync):
    """In `.over`, and in a plain loop with a flush; all of a window on one rank too, its first or a later one.

    With `sync="each"` a rank without a micro-batch takes part in the synchronisation of the others'.
    """
    for looped in (True, False):
        ranks(2).run(skipping, bad, looped, sync)


def discarded_alone(sync: str, how: str) -> None:
    """Rank 0 discards a window after its second micro-batch, in plain calls, or in an `.over` behind the first of them."""
    rank = dist.get_rank()
    windows = [[(0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2)], [(0, 5), (0, 6), (0, 7), (1, 3), (1, 4), (1, 5)]]
    for wrap in (lambda m: m, DDP):
        model = small_model()
        home = wrap(model)
        optimizer = Recorder(model.parameters())

        @accumulating(steps=3, sync=sync)
        def step(model, optimizer, i):
            if how == "exception" and (rank, i) == (0, 1):
                raise KeyError
            return mean_loss(model, micro_batch(rank, i))

        items = range(8 if rank == 0 else 6)
        step(home, optimizer, 0)
        for i in items[1:] if how == "plain" else step.over(items[1:]):
            if (rank, i) == (0, 1):
                with suppress(KeyError):
                    step(home, optimizer, i)
                step.reset()
            else:
                step(home, optimizer, i)
        expected, _ = train(small_model(), windows, window_mean)
        assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize("sync", ["window", "each"])
@pytest.mark.parametrize("how", ["plain", "exception", "reset"])
def test_what_one_rank_discards_counts_nowhere(ranks, sync, how):
    """With `sync="each"`, the others had its gradients already, and it came to their boundary with one of its held ones."""
    ranks(2).run(discarded_alone, sync, how, limit=20)


def spoiled(bad: list) -> None:
    """A type in `skip` that comes out of a backward: every rank drops that window, and the next one is right."""
    rank = dist.get_rank()

    for wrap in (lambda m: m, DDP):
        model = small_model()
        home = wrap(model)
        optimizer = Recorder(model.parameters())

        @accumulating(steps=3, skip=torch.OutOfMemoryError)
        def step(model, optimizer, i):
            error = torch.OutOfMemoryError("pretended") if [rank, i] == bad else None
            return mean_loss(model, Trap.apply(micro_batch(rank, i).requires_grad_(), error))

        for i in step.over(range(7)):
            assert (step(home, optimizer, i) is None) == ([rank, i] == bad)
        windows = [w for w in cut([7, 7], 3) if tuple(bad) not in w]
        expected, _ = train(small_model(), windows, window_mean)
        assert_equal_updates(optimizer.seen, expected)
        assert step.progress.skipped == 1 and step.progress.window == 3
        assert step.progress.dropped == (rank == bad[0])


@pytest.mark.parametrize("bad", [[0, 0], [1, 1], [0, 2], [1, 5], [1, 6]])
def test_a_skipped_type_out_of_a_backward_drops_the_window_everywhere(ranks, bad):
    ranks(2).run(spoiled, bad)


class FailingAt(torch.optim.SGD):
    """Its steps fail that have these numbers."""

    def __init__(self, parameters, numbers):
        super().__init__(parameters, lr=0.1)
        self.numbers, self.count = numbers, 0

    def step(self, *_):
        self.count += 1
        if self.count in self.numbers:
            raise ZeroDivisionError
        return super().step()


def bare(model):
    return model


def failing_in_a_loop(wrap, backward: bool) -> list:
    """One rank's boundary fails, in the backward or the step, and its user goes on; what each rank hears."""
    model = small_model()
    home = wrap(model)
    rank, said = dist.get_rank(), []
    optimizer = FailingAt(model.parameters(), [2] if rank == 1 and not backward else [])

    @accumulating(steps=2)
    def step(model, optimizer, x, fails):
        return Trap.apply(mean_loss(model, x), ZeroDivisionError() if fails and backward else None)

    try:
        for i in step.over(range(6)):
            try:
                step(home, optimizer, micro_batch(rank, i), (rank, i) == (1, 3))
            except ZeroDivisionError:
                said.append("failed")
    except GradSyncError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("backward", [True, False], ids=["backward", "step"])
@pytest.mark.parametrize("wrap", [bare, DDP])
def test_a_rank_that_has_missed_an_update_in_a_loop_is_named_on_every_rank(ranks, wrap, backward):
    """The others made that update."""
    for rank, said in enumerate(ranks(2).run(failing_in_a_loop, wrap, backward, limit=15)):
        assert said[:-1] == ["failed"] * rank
        assert "same number of closed windows, but rank 0 has 2, rank 1 has 1" in said[-1] and "skip=" in said[-1]


@pytest.mark.parametrize("scaling", [True, False])
def test_an_optimizer_that_fails_once(scaling):
    """The scaler takes the next window's gradients, as if the step had not begun."""
    model = small_model()
    optimizer, calls = torch.optim.SGD(model.parameters(), lr=0.1), []
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaling)

    def fail(*_):
        calls.append(None)
        if len(calls) == 1:
            raise ZeroDivisionError

    optimizer.register_step_pre_hook(fail)
    step = accumulating(2)(lambda model, optimizer, scaler, x: mean_loss(model, x))
    for i in range(6):
        try:
            step(model, optimizer, scaler, micro_batch(0, i))
        except ZeroDivisionError:
            assert i == 1
    assert (step.progress.updates, len(calls)) == (2, 3)


class OwnZeroGrad(torch.optim.SGD):
    """As fused optimizers of others: it knows nothing of `set_to_none`."""

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.zero_()


def test_an_optimizer_whose_zero_grad_takes_no_argument():
    model, twin = small_model(), small_model()
    optimizer, by_hand = OwnZeroGrad(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    step = accumulating(2)(lambda model, optimizer, x: mean_loss(model, x))
    for i in range(4):
        step(model, optimizer, micro_batch(0, i))
    assert all(p.grad is None for p in model.parameters())
    for start in (0, 2):
        window_mean(twin, [(0, start), (0, start + 1)]).backward()
        by_hand.step()
        by_hand.zero_grad()
    for p, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, expected, rtol=0, atol=1e-13)


def test_a_wrapper_that_does_not_step_at_a_boundary_is_an_error():
    """`with accelerator.accumulate(...)` left around a decorated call: its optimizer skips held steps, and this one."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = small_model()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = accumulating(3)(lambda model, optimizer, x: mean_loss(model, x))
    with pytest.raises(GradSyncError, match="did not step the SGD inside.*gradient_accumulation_steps=1"):
        for i in range(3):
            with accelerator.accumulate(model):
                step(model, optimizer, micro_batch(0, i))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def failing_as_it_lands(overlap: int) -> list:
    """On rank 1 the true step of the second window fails, and its user goes on; what each rank hears."""
    model, rank, said = small_model(), dist.get_rank(), []
    optimizer = FailingAt(model.parameters(), [4] if rank == 1 else [])  # each window has a provisional step before it

    @accumulating(steps=2, overlap=overlap)
    def step(model, optimizer, x):
        return mean_loss(model, x)

    try:
        for i in step.over(range(8)):
            try:
                step(model, optimizer, micro_batch(rank, i))
            except ZeroDivisionError:
                said.append("failed")
    except GradSyncError as error:
        said.append(str(error))
    progress = step.progress
    assert progress.updates + progress.skipped <= progress.window
    return said


@pytest.mark.parametrize("overlap", [1, 2])
def test_a_rank_whose_step_failed_as_gradients_landed_is_named_on_every_rank(ranks, overlap):
    """Its window had closed before; it is counted no longer."""
    for rank, said in enumerate(ranks(2).run(failing_as_it_lands, overlap, limit=15)):
        assert said[:-1] == ["failed"] * rank
        assert "same number of closed windows, but rank 0 has " in said[-1] and "A boundary failed" in said[-1]


def failing_before_any_parameter(steps: int, at: int, sync: str) -> None:
    """On rank 1 a boundary's backward fails at the loss: that of a static graph, which stays armed."""
    rank, model = dist.get_rank(), small_model()
    home, optimizer = DDP(model, static_graph=True), Recorder(model.parameters())

    @accumulating(steps=steps, skip=ZeroDivisionError, sync=sync)
    def step(model, optimizer, x, fails):
        return Trap.apply(mean_loss(model, x), ZeroDivisionError() if fails else None)

    for i in range(4 * steps):
        assert (step(home, optimizer, micro_batch(rank, i), (rank, i) == (1, at)) is None) == ((rank, i) == (1, at))
    windows = [w for w in cut([4 * steps] * 2, steps) if (1, at) not in w]
    expected, _ = train(small_model(), windows, window_mean)
    assert_equal_updates(optimizer.seen, expected)
    assert step.progress.skipped == 1


@pytest.mark.parametrize("sync", ["window", "each"])
@pytest.mark.parametrize(("steps", "at"), [(1, 1), (1, 2), (2, 1), (2, 3)])
def test_a_static_graph_goes_on_after_a_backward_that_failed_at_the_loss(ranks, steps, at, sync):
    ranks(2).run(failing_before_any_parameter, steps, at, sync, limit=15)
