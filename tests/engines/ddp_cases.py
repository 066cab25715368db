"""What runs on the ranks for test_ddp.py: DDP in every configuration."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync import LossSum, accumulating
from gradsync.engines._ddp import DDPEngine
from tests.support.reference import (
    Recorder, assert_equal_updates, cut, mean_loss, micro_batch, small_model, sum_loss, train, window_mean,
)  # fmt: skip


def num_collectives(group=None) -> int:
    return (group or dist.group.WORLD)._get_sequence_number_for_group()


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = small_model()
        self.norm = nn.BatchNorm1d(3).double()

    def forward(self, x):
        return self.inner(self.norm(x))

    def loss(self, x):
        return mean_loss(self, x)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner = small_model()
        self.reentrant = reentrant

    def forward(self, x):
        y = self.inner[1](checkpoint(self.inner[0], x.requires_grad_(), use_reentrant=self.reentrant))
        return checkpoint(self.inner[2], y, use_reentrant=self.reentrant)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(10, 3, sparse=True).double()
        self.head = nn.Linear(3, 2).double()

    def forward(self, x):
        return self.head(self.embedding(x.abs().sum(1).long() % 10))


def by_hand(ddp, optimizer, data, steps):
    """The loop that everybody means to write; whole windows only."""
    for i, x in enumerate(data):
        last = i % steps == steps - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            (mean_loss(ddp, x) / steps).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


DDPS = {
    "default": {},
    "find_unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "buckets": {"bucket_cap_mb": 1e-4},
}


def bitwise(config: str, make: str, dtype: str, how: str) -> None:
    """Whole windows: parameters and buffers are to the bit those of the loop by hand."""
    dtype = getattr(torch, dtype)
    torch.set_default_dtype(dtype)
    models = {"small": small_model, "buffers": WithBuffers}
    one, two = models[make]().to(dtype), models[make]().to(dtype)
    hand = DDP(one, **DDPS[config])
    mine = two if how.startswith("bare") else DDP(two, **DDPS[config])
    data = [micro_batch(dist.get_rank(), i, dtype=dtype) for i in range(12)]
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    by_hand(hand, sgd(one), data, 3)
    optimizer = sgd(two)
    if how.endswith("sync_every"):
        for micro, x in gradsync.sync_every(mine, 3, data):
            micro.backward(mean_loss(mine, x))
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()
    else:
        step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
        for x in step.over(data) if how.endswith("over") else data:
            step(mine, optimizer, x)
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values()):
        assert torch.equal(a, b), f"{name} differs by {(a - b).abs().max()}"


def scenario(name: str, kind: str = "ddp", lengths=(7, 7), steps: int = 3) -> None:
    """A model in some configuration against the float64 reference, tails included."""
    rank = dist.get_rank()
    reference = window_mean
    torch.manual_seed(7)
    loss_of = mean_loss
    if name == "static":
        model = small_model()
        home = DDP(model, static_graph=True)
    elif name == "static unused":
        model = small_model(unused=True)
        home = DDP(model, static_graph=True)
    elif name in {"reentrant", "not reentrant"}:
        model = Checkpointed(name == "reentrant")
        home = DDP(model) if kind == "ddp" else model
    elif name == "static reentrant":
        model = Checkpointed(True)
        home = DDP(model, static_graph=True)
    elif name == "sparse":
        model = Sparse()
        home = DDP(model) if kind == "ddp" else model
    elif name in {"ddp of compiled", "compiled ddp"}:
        model = small_model()
        home = DDP(torch.compile(model, backend="aot_eager")) if name == "ddp of compiled" else torch.compile(
            DDP(model), backend="aot_eager")
    elif name == "compiled bare":
        model = small_model()
        home = torch.compile(model, backend="aot_eager")
    elif name == "inside":
        model = small_model()
        home = nn.Sequential(DDP(model))
    elif name == "partly inside":  # DDP around one layer, the rest bare
        model = small_model()
        home = nn.Sequential(DDP(model[0]), model[1], model[2])
    elif name == "several":
        model = small_model()
        home = nn.Sequential(DDP(model[0]), model[1], DDP(model[2]))
    elif name == "method":
        model = WithBuffers().eval()
        home = model
        loss_of = lambda m, x: m.loss(x)  # noqa: E731
    elif name == "bypassed":
        model = small_model()
        home = DDP(model)
        loss_of = lambda m, x: mean_loss(m.module, x)  # noqa: E731
    elif name == "sub-module":
        model = WithBuffers().eval()
        home = model
        loss_of = lambda m, x: mean_loss(m.inner, m.norm(x))  # noqa: E731
    elif name == "two forwards":
        model = small_model()
        home = DDP(model) if kind == "ddp" else model
        loss_of = lambda m, x: (mean_loss(m, x[:2]) + mean_loss(m, x[2:])) / 2  # noqa: E731
        reference = lambda m, w: sum(loss_of(m, micro_batch(r, i)) for r, i in w) / len(w)  # noqa: E731
    else:
        raise ValueError(name)
    twin = copy.deepcopy(model)
    optimizer = Recorder(model.parameters())
    data = [micro_batch(rank, i) for i in range(lengths[rank])]
    step = accumulating(steps=steps)(lambda model, optimizer, x: loss_of(model, x))
    for x in step.over(data):
        step(home, optimizer, x)
    if name in {"method", "sub-module"}:
        reference = lambda m, w: sum(mean_loss(m, micro_batch(r, i)) for r, i in w) / len(w)  # noqa: E731
    if isinstance(twin, Checkpointed):
        twin = twin.inner  # torch.autograd.grad does not see through reentrant checkpoints
    expected, _ = train(twin, cut(list(lengths), steps), reference)
    assert_equal_updates(optimizer.seen, expected, 1e-11)


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


class SameTimes(list):
    """What a reducer noted before, and notes again: two backwards that take the same to the nanosecond."""

    __hash__ = None

    def __eq__(self, _):
        return True

    def __ne__(self, _):
        return False


def same_times(config: dict) -> None:
    """The times that a reducer notes may be those of the backward before; each window still reduces once."""
    rank = dist.get_rank()
    model = small_model(unused="find_unused_parameters" in config)
    home = DDP(model, **config)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    arm = DDPEngine.arm

    def armed(engine, loss):
        arm(engine, loss)
        engine._stats_before = engine._stats_before and SameTimes(engine._stats_before)

    counts = []
    DDPEngine.arm = armed
    try:
        for i in range(8):
            before = num_collectives()
            step(home, optimizer, micro_batch(rank, i))
            counts.append(num_collectives() - before)
    finally:
        DDPEngine.arm = arm
    once = 2 if "find_unused_parameters" in config else 1
    assert counts[4:] == [0, once, 0, once], counts
    windows = [[(r, i + k) for k in range(2) for r in range(2)] for i in (0, 2, 4, 6)]
    expected, _ = train(small_model(unused="find_unused_parameters" in config), windows, window_mean)
    assert_equal_updates(optimizer.seen, expected)


def searched() -> tuple[DDP, Recorder]:
    """A model with an unused parameter on a DDP that looks for those."""
    model = small_model(unused=True)
    return DDP(model, find_unused_parameters=True), Recorder(model.parameters())


def dropped_by_the_user() -> None:
    """A search for unused parameters remembers what held backwards used, also if somebody drops their gradients."""
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    home, optimizer = searched()

    @accumulating(steps=1)
    def step(model, optimizer, x, fails=False):
        loss = mean_loss(model, x)
        if fails:
            loss.register_hook(lambda _: 1 / 0)
        return loss

    step(home, optimizer, micro_batch(rank, 0))
    for micro, x in zip(gradsync.sync_every(home, 2), [micro_batch(rank, 1)], strict=False):
        micro.backward(mean_loss(home, x))
    optimizer.zero_grad()
    for fails in (True, False):
        with contextlib.suppress(ZeroDivisionError):
            step(home, optimizer, micro_batch(rank, 2), fails=fails)
    with gradsync.no_sync(home):
        mean_loss(home, micro_batch(rank, 3)).backward()
    optimizer.zero_grad()
    step(home, optimizer, micro_batch(rank, 4))
    expected, _ = train(small_model(unused=True), [[(r, i) for r in ranks] for i in (0, 2, 4)], window_mean)
    assert_equal_updates(optimizer.seen, expected)


def dropped_by_a_backward() -> None:
    """The same for a held backward that fails half-way with a type in `skip`, and a tail that then closes."""
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    home, optimizer = searched()

    @accumulating(steps=2, skip=ZeroDivisionError)
    def step(home, optimizer, number):
        x = micro_batch(rank, number).requires_grad_()
        if number == 0:
            x.register_hook(lambda _: 1 / 0)  # after the last parameter
        return mean_loss(home, x)

    for numbers in ([0], [1, 2]):
        for number in step.over(numbers):
            step(home, optimizer, number)
    expected, _ = train(small_model(unused=True), [[(r, i) for r in ranks for i in (1, 2)]], window_mean)
    assert_equal_updates(optimizer.seen, expected)
    assert step.progress.dropped == step.progress.skipped == 1


def flush_scenario(name: str) -> None:
    """flush() with the user's communication hook, and after a static graph's first window."""
    rank = dist.get_rank()
    model = small_model()
    calls = []
    home = DDP(model, static_graph=name == "static", gradient_as_bucket_view=name == "views")
    if name == "hook":

        def hook(state, bucket):
            calls.append(bucket.index())
            work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        home.register_comm_hook(None, hook)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    for i in range(8):
        step(home, optimizer, micro_batch(rank, i))
    held = len(calls)
    step.flush()
    expected, _ = train(small_model(), cut([8, 8], 3), window_mean)
    assert_equal_updates(optimizer.seen, expected)
    if name == "hook":
        assert held == 2 and len(calls) == 3, calls


def compressed(how: str) -> None:
    """A built-in compression hook is kept, also where the reducer had to be made anew."""
    rank = dist.get_rank()
    model = small_model(torch.float32)
    model[0].requires_grad_(False)
    home = DDP(model)
    home._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    model[0].requires_grad_(True)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    for i in range(2):
        step(home, optimizer, micro_batch(rank, i, dtype=torch.float32))
    for g in optimizer.seen[0]:
        assert torch.equal(g, g.half().float()), "what was reduced in half precision fits into it"


def collectives() -> None:
    """Held micro-batches communicate nothing; the boundary reduces each bucket once and nothing else."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, DDP):
        model = small_model()
        home = wrap(model)
        optimizer = Recorder(model.parameters())
        step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
        counts = []
        for i in range(12):
            before = num_collectives()
            step(home, optimizer, micro_batch(rank, i))
            counts.append(num_collectives() - before)
        # Between more than two ranks, the ledger behind a bare model has a bucket of its own.
        once = 2 if home is model and dist.get_world_size() > 2 else 1
        assert counts[3:] == [0, 0, once] * 3, counts
        sums = accumulating(steps=3)(lambda model, optimizer, x: LossSum(sum_loss(model, x), x.numel()))
        counts = []
        for i in range(9):
            before = num_collectives()
            sums(home, optimizer, micro_batch(rank, i))
            counts.append(num_collectives() - before)
        # The counts travel in the ledger; for DDP of the user's own they need a collective.
        told = once if home is model else 2
        assert counts == [0, 0, told] * 3, counts
        # Where lengths are known, nothing is sent at all; where not, one table with the first window that ends the data.
        items = [micro_batch(rank, i) for i in range(9)]
        for data, told in ((items, 0), (iter(items), 1)):
            counts = []
            for x in step.over(data):
                before = num_collectives()
                step(home, optimizer, x)
                counts.append(num_collectives() - before)
            assert counts == [0, 0, once, 0, 0, once, 0, 0, once + told], counts
        # After it, a table goes along with each window; in the ledger, where there is one.
        mine = items[: [3, 8, 9][rank]]
        rides = once if home is model else 2
        for data, expected in ((mine, [0, 0, once] * 3), (iter(mine), [0, 0, once + 1, 0, 0, rides, 0, 0, rides])):
            counts = []
            for x in step.over(data):
                before = num_collectives()
                step(home, optimizer, x)
                counts.append(num_collectives() - before)
            if len(mine) == 8:
                expected[7:] = [expected[8]]
            assert counts == expected[: len(mine)], counts
        # Known is what is held, and what is left from the first call on.
        step(home, optimizer, items[0])
        counts = []
        for i, x in enumerate(step.over(items[: 6 - rank])):
            before = num_collectives()
            if i:
                step(home, optimizer, x)
            counts.append(num_collectives() - before)
        assert counts == [0, 0, once, 0, 0, once][: 6 - rank - 1] + [once], counts
        for data, told in ((items, 0), (iter(items), 1)):
            counts = []
            for micro, x in gradsync.sync_every(home, 3, data):
                before = num_collectives()
                micro.backward(mean_loss(home, x))
                counts.append(num_collectives() - before)
                if micro.last:
                    optimizer.step()
                    optimizer.zero_grad()
            assert counts == [0, 0, once, 0, 0, once, 0, 0, once + told], counts


def buffers() -> None:
    """Broadcast as a window opens, from rank 0, and by no forward."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, DDP):
        model = WithBuffers()
        home = wrap(model)
        optimizer = Recorder(model.parameters())
        seen = []

        def body(model, optimizer, x):
            seen.append(home.norm.running_mean.clone() if home is model else home.module.norm.running_mean.clone())
            return mean_loss(home, x)

        step = accumulating(steps=2, model=home)(lambda optimizer, x: body(model, optimizer, x))
        step(optimizer, micro_batch(rank, 0)), step(optimizer, micro_batch(rank, 1))
        with torch.no_grad():
            model.norm.running_mean.fill_(10.0 + rank)
        for i in range(2, 4):
            step(optimizer, micro_batch(rank, i))
        assert torch.equal(seen[2], torch.full((3,), 10.0, dtype=torch.float64)), seen[2]
        others = [torch.empty_like(seen[3]) for _ in range(2)]
        dist.all_gather(others, seen[3])
        assert not torch.equal(*others), "in the window each rank's statistics are its own"


def freezing(wrap: str) -> None:
    """Layers frozen and unfrozen between windows synchronise as they are."""
    rank = dist.get_rank()
    model, twin = small_model(), small_model()
    for one in (model, twin):
        one[0].requires_grad_(False)
    home = model if wrap == "bare" else DDP(model)
    optimizer = Recorder(model.parameters(), lr=0.0)
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    for window, trainable in enumerate([False, True, True, False, True]):
        model[0].requires_grad_(trainable)
        for i in range(2):
            step(home, optimizer, micro_batch(rank, 2 * window + i))
    expected, _ = train(small_model(), cut([10, 10], 2), window_mean, lr=0.0)
    for window, trainable in enumerate([False, True, True, False, True]):
        want = expected[window] if trainable else [None, None, *expected[window][2:]]
        assert_equal_updates([optimizer.seen[window]], [want])


def unused_sometimes() -> None:
    """A bare model's parameter that this rank, or this micro-batch, did not use; one that nobody used stays None."""
    rank = dist.get_rank()
    model = nn.ModuleList([nn.Linear(3, 1).double() for _ in range(4)])
    optimizer = Recorder(model.parameters(), lr=0.0)
    uses = {0: {0: [0], 1: [0, 1]}, 1: {0: [0], 1: [2]}}  # rank, micro-batch -> layers; the last is never used

    @accumulating(steps=2)
    def step(model, optimizer, x, layers):
        return sum(mean_loss(model[i], x) for i in layers)

    for _ in range(3):
        for i in range(2):
            step(model, optimizer, micro_batch(rank, i), uses[rank][i])
    twin = copy.deepcopy(model)
    loss = sum(mean_loss(twin[k], micro_batch(r, i)) for r in (0, 1) for i in (0, 1) for k in uses[r][i]) / 4
    expected = torch.autograd.grad(loss, list(twin.parameters()), allow_unused=True)
    assert expected[-1] is None
    assert_equal_updates(optimizer.seen, [list(expected)] * 3)


def unused_in_ddp() -> str:
    """What DDP itself would only report at the next forward."""
    model = small_model(unused=True)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=1)(lambda model, optimizer, x: mean_loss(model, x))
    try:
        step(DDP(model), optimizer, micro_batch(dist.get_rank(), 0))
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


def sub_group() -> None:
    """The model's own group: rank 2 has nothing to do with it."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    model = small_model()
    home = DDP(model, process_group=group)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    for x in step.over([micro_batch(rank, i) for i in range(3 + 2 * rank)]):
        step(home, optimizer, x)
    expected, _ = train(small_model(), cut([3, 5], 2), window_mean)
    assert_equal_updates(optimizer.seen, expected)


def a_gan() -> None:
    """Two DDP models, each other's bystanders, with cadences of their own."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    g, d = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
    twin_g, twin_d = copy.deepcopy(g), copy.deepcopy(d)
    home_g, home_d = DDP(g), DDP(d)
    opt_g, opt_d = Recorder(g.parameters()), Recorder(d.parameters())
    g_step = accumulating(steps=2)(lambda g, d, opt, x: -d(g(x)).mean())
    d_step = accumulating(steps=4)(lambda g, d, opt, x: d(g(x)).square().mean())
    for i in range(8):
        d_step(home_g, home_d, opt_d, micro_batch(rank, i))
        g_step(home_g, home_d, opt_g, micro_batch(rank, 50 + i))
    assert len(opt_g.seen) == 4 and len(opt_d.seen) == 2
    # The reference, in the same order.
    sgd_g, sgd_d = Recorder(twin_g.parameters()), Recorder(twin_d.parameters())
    for i in range(8):
        for r in range(2):
            (twin_d(twin_g(micro_batch(r, i)).detach()).square().mean() / 8).backward()
        if i % 4 == 3:
            sgd_d.step(), sgd_d.zero_grad()
        for r in range(2):
            loss = -twin_d(twin_g(micro_batch(r, 50 + i))).mean() / 4
            for p, v in zip(twin_g.parameters(), torch.autograd.grad(loss, list(twin_g.parameters()))):
                p.grad = v if p.grad is None else p.grad + v
        if i % 2 == 1:
            sgd_g.step(), sgd_g.zero_grad()
    assert_equal_updates(opt_g.seen, sgd_g.seen, 1e-11)
    assert_equal_updates(opt_d.seen, sgd_d.seen, 1e-11)


def an_inf_on_one_rank() -> None:
    """Every rank skips, no scheduler moves, and the next window is right."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, DDP):
        model = small_model()
        home = wrap(model)
        optimizer = Recorder(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        step = accumulating(steps=2)(lambda model, optimizer, sched, scaler, x, f: mean_loss(model, x) * f)
        for i in range(4):
            poison = float("inf") if (rank == 1 and i == 0) else 1.0
            step(home, optimizer, scheduler, scaler, micro_batch(rank, i % 2), poison)
            if i == 1:
                assert step.progress.skipped == 1 and not step.progress.stepped
                assert optimizer.param_groups[0]["lr"] == 0.1 and scaler.get_scale() == 128.0
        expected, _ = train(small_model(), cut([2, 2], 2), window_mean)
        assert_equal_updates(optimizer.seen, expected)


def nonfinite_on_one_rank(policy: str) -> list:
    rank = dist.get_rank()
    model = small_model()
    optimizer = Recorder(model.parameters(), momentum=0.9)
    step = accumulating(steps=2, nonfinite=policy)(lambda model, optimizer, x, f: mean_loss(model, x) * f)
    said = []
    for i in range(4):
        try:
            step(model, optimizer, micro_batch(rank, i % 2), float("nan") if rank == 1 and i == 0 else 1.0)
        except gradsync.GradSyncError as error:
            said.append(str(error))
    expected, _ = train(small_model(), cut([2, 2], 2), window_mean)
    assert_equal_updates(optimizer.seen, expected)
    return said


def freed(wrap: str) -> None:
    """The DDP behind a model dies with it; copies and pickles of the model never see it."""
    model = small_model()
    attributes, keys = set(vars(model)), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    home = model if wrap == "bare" else DDP(model)
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    for i in range(3):
        step(home, optimizer, micro_batch(dist.get_rank(), i))
    assert set(vars(model)) == attributes and list(model.state_dict()) == keys
    if wrap == "bare":
        twin = copy.deepcopy(model)
        assert gradsync.engines.behind(twin) is None and gradsync.engines.behind(model) is not None
        pickle.loads(pickle.dumps(model))
    step.flush()
    reducer = weakref.ref(gradsync.engines.behind(model) if wrap == "bare" else home)
    refs = [reducer, weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(optimizer)]
    gc.collect()
    gc.disable()
    try:
        del model, home, optimizer
        assert all(ref() is None for ref in refs[:1] + refs[3:]), refs
        if wrap == "bare":
            assert all(ref() is None for ref in refs), refs
    finally:
        gc.enable()


def sync_gradients_alone() -> None:
    """A loop of one's own: hold everything, then synchronise; one rank has nothing at all."""
    rank = dist.get_rank()
    for kwargs in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        model = small_model()
        home = DDP(model, **kwargs)
        with gradsync.no_sync(home):
            if rank == 0:
                for i in range(3):
                    mean_loss(home, micro_batch(0, i)).backward()
        gradsync.sync_gradients(home)
        twin = small_model()
        expected = torch.autograd.grad(
            sum(mean_loss(twin, micro_batch(0, i)) for i in range(3)) / 2, list(twin.parameters()))
        assert_equal_updates([[p.grad for p in model.parameters()]], [list(expected)])


def no_sync_everywhere() -> None:
    """Local gradients in it, the flag restored after it, nested and after an exception."""
    rank = dist.get_rank()
    for make in (lambda m: DDP(m), lambda m: nn.Sequential(DDP(m)), lambda m: torch.compile(DDP(m), backend="eager")):
        model = small_model()
        home = make(model)
        inner = next(m for m in home.modules() if isinstance(m, DDP))
        before = num_collectives()
        with gradsync.no_sync(home):
            with gradsync.no_sync(home):
                mean_loss(home, micro_batch(rank, 0)).backward()
            assert not inner.require_backward_grad_sync
            mean_loss(home, micro_batch(rank, 1)).backward()
        assert num_collectives() == before and inner.require_backward_grad_sync
        with contextlib.suppress(ZeroDivisionError), gradsync.no_sync(home):
            raise ZeroDivisionError
        assert inner.require_backward_grad_sync
        with gradsync.no_sync(home, enabled=False):
            assert inner.require_backward_grad_sync
        model.zero_grad()


def leaving_sync_every(how: str) -> None:
    """A break, an exception or a return out of the loop leaves the engine as it was found."""
    home = DDP(small_model())
    data = [micro_batch(dist.get_rank(), i) for i in range(8)]

    def loop():
        for micro, x in gradsync.sync_every(home, 4, data):
            micro.backward(mean_loss(home, x))
            if micro.index == 1:
                if how == "break":
                    break
                if how == "return":
                    return
                raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        loop()
    assert home.require_backward_grad_sync and home.require_forward_param_sync
    home.zero_grad()
    before = num_collectives()
    mean_loss(home, data[0]).backward()
    assert num_collectives() > before, "DDP synchronises as before"


def endless_sync_every() -> None:
    """Zipped with a loop, several models."""
    rank = dist.get_rank()
    one, two = small_model(), small_model()
    homes = DDP(one), two
    optimizer = Recorder([*one.parameters(), *two.parameters()])
    data = [micro_batch(rank, i) for i in range(6)]
    for micro, x in zip(gradsync.sync_every(homes, 3), data):
        micro.backward(mean_loss(homes[0], x) + mean_loss(homes[1], x))
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()
    assert homes[0].require_backward_grad_sync
    expected, _ = train(small_model(), cut([6, 6], 3), window_mean)
    assert_equal_updates(optimizer.seen, [e + e for e in expected])


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.armed:
            raise ZeroDivisionError
        return g, None


def failing_plain_backward(where: int, fails: list, sized: bool) -> None:
    """The same in a `loss.backward()` of the user's own, once it has reached a parameter."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, DDP):
        model = small_model()
        home = wrap(model)
        optimizer = Recorder(model.parameters(), lr=0.0)
        for attempt in range(4):
            items = [micro_batch(rank, i) for i in range(2)]
            try:
                for micro, x in gradsync.sync_every(home, 2, items if sized else iter(items)):
                    armed = rank == 1 and attempt in fails and micro.last
                    y = model[0](Trap.apply(x.requires_grad_(), armed and where == 2))
                    y = model[2](model[1](Trap.apply(y, armed and where == 0)))
                    (y.square().mean() / 2).backward()
                    if micro.last:
                        optimizer.step()
            except ZeroDivisionError:
                pass
            optimizer.zero_grad()
        twin = small_model()
        loss = sum(twin(micro_batch(r, i)).square().mean() for r in range(2) for i in range(2)) / 4
        expected = [list(torch.autograd.grad(loss, list(twin.parameters())))]
        assert_equal_updates(optimizer.seen[-2:], expected * 2)


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
            y = inner[0](Trap.apply(x.requires_grad_(), armed and where == 2))
            y = Trap.apply(y, armed and where == 0)
            y = inner[2](inner[1](y))
            return Trap.apply(y, armed and where == 1).square().mean()

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


def skipping(bad: list) -> None:
    """One rank drops micro-batches, the boundary's among them; the mean is over what remained."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, DDP):
        model = small_model()
        home = wrap(model)
        optimizer = Recorder(model.parameters())

        @accumulating(steps=3, skip=ValueError)
        def step(model, optimizer, i):
            if [rank, i] in bad:
                raise ValueError
            return mean_loss(model, micro_batch(rank, i))

        for i in step.over(range(8)):
            step(home, optimizer, i)
        windows = [[(r, i) for r, i in w if [r, i] not in bad] for w in cut([8, 8], 3)]
        expected, _ = train(small_model(), [w for w in windows if w], window_mean)
        assert_equal_updates(optimizer.seen, expected)
        assert step.progress.dropped == sum(r == rank for r, _ in bad)


def disagreement(what: str, iterator: bool = False) -> str:
    """What each rank is told."""
    rank = dist.get_rank()
    model = small_model() if what != "parameters" else nn.Linear(3, 2 + rank).double()
    optimizer = Recorder(model.parameters())
    steps = {"steps": 2 + rank, "steps later": lambda window: 2 + rank * (window == 1)}.get(what, 2)
    tail = "drop" if what == "tail" and rank else "step"

    @accumulating(steps=steps, tail=tail)
    def step(model, optimizer, x):
        if what == "loss" and rank:
            return LossSum(sum_loss(model, x), x.numel())
        return mean_loss(model, x)

    try:
        if what == "flush":
            for i in range(2 + rank * 2):
                if rank == 0 or i < 2:
                    step(model, optimizer, micro_batch(rank, i))
            if rank:
                step(model, optimizer, micro_batch(rank, 3))
            step.flush()
            return "no error"
        if what == "steps later" and iterator:
            for micro, x in gradsync.sync_every(model, steps, [micro_batch(rank, i) for i in range(8)]):
                micro.backward(mean_loss(model, x))
        for i in range(6):
            step(model, optimizer, micro_batch(rank, i))
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


def flushing_an_empty_rank(wrap: str) -> None:
    """A rank that never called the function takes part in its flush, where models and optimizer are named."""
    rank = dist.get_rank()
    model = small_model()
    home = model if wrap == "bare" else DDP(model)
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=4, model=home, optimizer=optimizer)(lambda x: mean_loss(home, x))
    for i in range(0 if rank else 3):
        step(micro_batch(rank, i))
    step.flush()
    expected, _ = train(small_model(), [[(0, 0), (0, 1), (0, 2)]], window_mean)
    assert_equal_updates(optimizer.seen, expected)


def empty_rank_unknown(everywhere: bool, flush: bool) -> str:
    """A rank without items whose models nobody named."""
    rank = dist.get_rank()
    model = small_model()
    optimizer = Recorder(model.parameters())
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    try:
        items = [] if everywhere or rank == 1 else [micro_batch(rank, 0)]
        for x in items if flush else step.over(items):
            step(model, optimizer, x)
        if flush:
            step.flush()
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


def spoiled(bad: list) -> None:
    """A type in `skip` that comes out of a backward: every rank drops that window, and the next one is right."""
    rank = dist.get_rank()

    class Trap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, armed):
            ctx.armed = armed
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            if ctx.armed:
                raise torch.OutOfMemoryError("pretended")
            return g, None

    for wrap in (lambda m: m, DDP):
        model = small_model()
        home = wrap(model)
        optimizer = Recorder(model.parameters())

        @accumulating(steps=3, skip=torch.OutOfMemoryError)
        def step(model, optimizer, i):
            return mean_loss(model, Trap.apply(micro_batch(rank, i).requires_grad_(), [rank, i] == bad))

        for i in step.over(range(7)):
            assert (step(home, optimizer, i) is None) == ([rank, i] == bad)
        windows = [w for w in cut([7, 7], 3) if tuple(bad) not in w]
        expected, _ = train(small_model(), windows, window_mean)
        assert_equal_updates(optimizer.seen, expected)
        assert step.progress.skipped == 1 and step.progress.window == 3
        assert step.progress.dropped == (rank == bad[0])
