"""Accelerate's accumulate beside ours."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean


def with_accelerate(length: int, steps: int) -> tuple[list, list]:
    """The updates of Accelerate's accumulate, on a prepared loader, and of gradsync."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, size = dist.get_rank(), dist.get_world_size()
    data = [micro_batch(rank, i) for i in range(length)]
    theirs = small_model()
    optimizer = Recorder(theirs.parameters())
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state() if state is not GradientState else state._shared_state.clear()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    wrapped = DDP(theirs) if size > 1 else theirs
    wrapped, prepared = accelerator.prepare(wrapped, optimizer)
    loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(torch.stack(data), batch_size=None))
    if size > 1:  # each rank has data of its own already
        loader = _Whole(data, accelerator.gradient_state)
    for x in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(mean_loss(wrapped, x))
            prepared.step()
            prepared.zero_grad()
    return optimizer.seen, data


class _Whole:
    """A loader that tells Accelerate of its end, as a prepared one does."""

    def __init__(self, data, state):
        self.data, self.state, self.remainder, self.end_of_dataloader = data, state, -1, False

    def __iter__(self):
        self.state._add_dataloader(self)
        for i, x in enumerate(self.data):
            self.end_of_dataloader = i == len(self.data) - 1
            yield x
        self.state._remove_dataloader(self)


def full_windows() -> None:
    """Where the window is full, Accelerate and gradsync agree, within a rounding of float64."""
    theirs, data = with_accelerate(6, 3)
    model = small_model()
    home = DDP(model) if dist.get_world_size() > 1 else model
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    for x in step.over(data):
        step(home, optimizer, x)
    assert len(theirs) == len(optimizer.seen) == 2
    assert_equal_updates(optimizer.seen, theirs, 1e-15)


def the_tail() -> None:
    """Rows 2 and 3: the short window at the end. Theirs is too small by its length over N; ours is the mean."""
    theirs, data = with_accelerate(4, 3)
    size = dist.get_world_size()
    model = small_model()
    home = DDP(model) if size > 1 else model
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    for x in step.over(data):
        step(home, optimizer, x)
    expected, _ = train(small_model(), cut([4] * size, 3), window_mean)
    assert_equal_updates(optimizer.seen, expected)
    assert len(theirs) == 2
    for theirs_g, exact in zip(theirs[1], expected[1], strict=True):
        torch.testing.assert_close(theirs_g, exact / 3)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", [full_windows, the_tail])
def test_beside_accelerate(ranks, case, size):
    pytest.importorskip("accelerate")
    ranks(size).run(case)
