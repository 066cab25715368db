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


def forwards(wrap: str) -> tuple[int, int]:
    """How many forwards of DDP itself three micro-batches run, and how often its own hooks ran; it is as it was."""
    rank = dist.get_rank()
    model, seen, hooked = small_model(), [], []

    class Counted(DDP):
        def _pre_forward(self, *inputs, **kwargs):
            seen.append(self.require_backward_grad_sync)
            return super()._pre_forward(*inputs, **kwargs)

    class Overridden(Counted):
        def forward(self, *inputs, **kwargs):
            return super().forward(*inputs, **kwargs)

    kwargs = {"find_unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}.get(wrap, {})
    if wrap == "compiled inside":
        home = Counted(torch.compile(model, backend="aot_eager"))
    else:
        home = (Overridden if wrap == "overridden" else Counted)(model, **kwargs)
    home.register_forward_hook(lambda *_: hooked.append(1))
    called = torch.compile(home, backend="aot_eager") if wrap == "compiled" else home
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    join = home._join_config
    if wrap == "joining":
        home._join_config = join._replace(enable=True)
        home._check_global_requires_backward_grad_sync = lambda is_joined_rank: None
    for i in range(3):
        step(called, optimizer, micro_batch(rank, i))
    home._join_config = join
    assert "forward" not in vars(home) and not any(seen)
    expected, _ = train(small_model(), [[(r, i) for i in range(3) for r in range(2)]], window_mean)
    assert_equal_updates(optimizer.seen, expected)
    with gradsync.no_sync(home), gradsync.no_sync(home):
        pass
    assert "forward" not in vars(home)
    return len(seen), len(hooked)


@pytest.mark.parametrize(
    ("wrap", "times"),
    [
        ("plain", 0), ("overridden", 3), ("find_unused", 3), ("static", 3), ("joining", 3), ("compiled", 3),
        ("compiled inside", 3),
    ],
)  # fmt: skip
def test_ddps_own_forward_runs_where_it_adds_something(ranks, wrap, times):
    assert ranks(2).run(forwards, wrap) == [(times, 3)] * 2


def alone(what: str) -> str:
    """One rank on DDP: nothing is sent, and nothing else is different."""
    model, twin = small_model(unused=what == "unused"), small_model(unused=what == "unused")
    home, optimizer = DDP(model), torch.optim.SGD(model.parameters(), lr=0.1)
    hooked = []

    def hook(state, bucket):
        hooked.append(bucket.index())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    if what == "hook":
        home.register_comm_hook(None, hook)
    before = num_collectives()
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    try:
        for i, x in enumerate(step.over([micro_batch(0, i) for i in range(5)])):
            if (what, i) == ("late hook", 2):
                home.register_comm_hook(None, hook)
            step(home, optimizer, x)
    except gradsync.GradSyncError as error:
        return str(error)
    assert len(hooked) == {"hook": 3, "late hook": 2}.get(what, 0)
    assert hooked or num_collectives() == before
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.1)
    for window in ([0, 1], [2, 3], [4]):
        for i in window:
            (mean_loss(twin, micro_batch(0, i)) / len(window)).backward()
        by_hand.step()
        by_hand.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    home(micro_batch(0, 0)).sum().backward()  # its reducer goes on as ever
    assert all(p.grad is not None for p in model.parameters())
    return "equal"


def test_one_rank_on_ddp(ranks):
    for what in ("plain", "hook", "late hook"):
        assert ranks(1).run(alone, what) == ["equal"]
    assert "must be used in each window" in ranks(1).run(alone, "unused")[0]


def reduces_once(config: dict) -> None:
    """Whether the backward came by is told by a hook: each window reduces once, and not once more after it."""
    rank = dist.get_rank()
    model = small_model(unused="find_unused_parameters" in config)
    home = DDP(model, **config)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    counts = []
    for i in range(8):
        before = num_collectives()
        step(home, optimizer, micro_batch(rank, i))
        counts.append(num_collectives() - before)
    once = 2 if "find_unused_parameters" in config else 1
    assert counts[4:] == [0, once, 0, once], counts
    windows = [[(r, i + k) for k in range(2) for r in range(2)] for i in (0, 2, 4, 6)]
    expected, _ = train(small_model(unused="find_unused_parameters" in config), windows, window_mean)
    assert_equal_updates(optimizer.seen, expected)


@pytest.mark.parametrize(
    "config", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}]
)
def test_each_window_reduces_once(ranks, config):
    ranks(2).run(reduces_once, config)
