"""DDP's own forward and its reducer, which go on as ever."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import mean_loss, micro_batch, train, window_mean
from tests.support.wire import num_collectives


class Counted(DDP):
    """Counts its forwards, and how often its own hooks ran."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen, self.hooked = [], []
        self.register_forward_hook(lambda *_: self.hooked.append(1))

    def _pre_forward(self, *inputs, **kwargs):
        self.seen.append(self.require_backward_grad_sync)
        return super()._pre_forward(*inputs, **kwargs)


class Overridden(Counted):
    def forward(self, *inputs, **kwargs):
        return super().forward(*inputs, **kwargs)


class Joining(Counted):
    """As inside of torch's `Join`."""

    def __init__(self, model):
        super().__init__(model)
        self._join_config = self._join_config._replace(enable=True)

    def _check_global_requires_backward_grad_sync(self, is_joined_rank):
        pass


def compiled(model):
    return torch.compile(Counted(model), backend="aot_eager")


def compiled_inside(model):
    return Counted(torch.compile(model, backend="aot_eager"))


def forwards(wrap, options: dict) -> tuple[int, int]:
    """How many forwards of DDP itself three micro-batches run, and how often its own hooks ran; it is as it was."""
    rank, model = dist.get_rank(), small_model()
    called = wrap(model, **options)
    home = getattr(called, "_orig_mod", called)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    for i in range(3):
        step(called, optimizer, micro_batch(rank, i))
    home._join_config = home._join_config._replace(enable=False)
    assert "forward" not in vars(home) and not any(home.seen)
    expected, _ = train(small_model(), [[(r, i) for i in range(3) for r in range(2)]], window_mean)
    assert_equal_updates(optimizer.seen, expected)
    with gradsync.no_sync(home), gradsync.no_sync(home):
        pass
    assert "forward" not in vars(home)
    return len(home.seen), len(home.hooked)


@pytest.mark.parametrize(
    ("wrap", "options", "times"),
    [
        (Counted, {}, 0), (Overridden, {}, 3), (Counted, {"find_unused_parameters": True}, 3),
        (Counted, {"static_graph": True}, 3), (Joining, {}, 3), (compiled, {}, 3), (compiled_inside, {}, 3),
    ],
)  # fmt: skip
def test_ddps_own_forward_runs_where_it_adds_something(ranks, wrap, options, times):
    assert ranks(2).run(forwards, wrap, options) == [(times, 3)] * 2


def alone(hook_before: int | None, unused: bool = False) -> int | str:
    """One rank on DDP: nothing is sent, and nothing else is different. How often the hook ran that this item finds."""
    model, twin = small_model(unused=unused), small_model(unused=unused)
    home, optimizer = DDP(model), torch.optim.SGD(model.parameters(), lr=0.1)
    hooked = []

    def hook(state, bucket):
        hooked.append(bucket.index())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    before = num_collectives()
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    try:
        for i, x in enumerate(step.over([micro_batch(0, i) for i in range(5)])):
            if i == hook_before:
                home.register_comm_hook(None, hook)
            step(home, optimizer, x)
    except gradsync.GradSyncError as error:
        return str(error)
    assert hooked or num_collectives() == before
    num_hooked = len(hooked)
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.1)
    for window in ([0, 1], [2, 3], [4]):
        for i in window:
            (mean_loss(twin, micro_batch(0, i)) / len(window)).backward()
        by_hand.step()
        by_hand.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    home(micro_batch(0, 0)).sum().backward()  # its reducer goes on as ever
    assert all(p.grad is not None for p in model.parameters())
    return num_hooked


def test_one_rank_on_ddp(ranks):
    for hook_before, times in ((None, 0), (0, 3), (2, 2)):
        assert ranks(1).run(alone, hook_before) == [times]
    assert "must be used in each window" in ranks(1).run(alone, None, True)[0]


def reduces_once(config: dict) -> None:
    """Whether the backward came by is told by a hook: each window reduces once, and not once more after it."""
    rank = dist.get_rank()
    unused = config.get("find_unused_parameters", False)
    model = small_model(unused=unused)
    home = DDP(model, **config)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    counts = []
    for i in range(8):
        before = num_collectives()
        step(home, optimizer, micro_batch(rank, i))
        counts.append(num_collectives() - before)
    once = 2 if unused else 1
    assert counts[4:] == [0, once, 0, once], counts
    windows = [[(r, i + k) for k in range(2) for r in range(2)] for i in (0, 2, 4, 6)]
    expected, _ = train(small_model(unused=unused), windows, window_mean)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize(
    "config", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}]
)
def test_each_window_reduces_once(ranks, config):
    ranks(2).run(reduces_once, config)
