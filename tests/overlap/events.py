"""What runs on the ranks for test_events.py: what comes in between while gradients travel."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import GradSyncError
from gradsync._audit.engines import NUM_TRAVELLING
from gradsync.engines import behind
from tests.overlap.decorated import Training
from tests.overlap.loop import Model, Plan, optimizer_of
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch


def in_flight(m: int = 2, num_more: int = 0, **options) -> Training:
    """Two windows have closed, one has landed, and `num_more` micro-batches of the third have run."""
    training = Training(Plan((), m, **options))
    for index in range(6 + num_more):
        training.step(index)
    assert len(training.seen) == (1 if num_more < m else 2)
    return training


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def goes_back_and_lands_at_the_next_call() -> None:
    """An exception leaves the last true parameters at once; the update comes with the next call, and equals settle()'s."""
    reference = in_flight(num_more=1)
    reference.step.settle()
    training = in_flight(num_more=1)
    assert not same(training.parameters, training.seen[0]), "provisional"
    training.fails_at = 7
    with pytest.raises(ZeroDivisionError):
        training.step(7)
    assert same(training.parameters, training.seen[0])
    assert training.step.progress.updates == 1 and training.step.progress.index == 0
    training.step(8)
    assert same(training.parameters, reference.parameters) and len(training.seen) == 2
    assert training.step.progress.index == 1


def settling() -> None:
    """What settles: settle, flush, the state, models' and optimizers' states, leaving .over, a frozen parameter."""
    ways = {
        "settle": lambda one: one.step.settle(),
        "state_dict": lambda one: one.step.state_dict(),
        "load": lambda one: one.step.load_state_dict(Training(Plan((), 2)).step.state_dict()),
        "model": lambda one: one.model.state_dict(),
        "optimizer": lambda one: one.optimizer.state_dict(),
        "inside": lambda one: one.model.inner.state_dict(),
        "flush": lambda one: one.step.flush(),
        "participants": freeze_and_call,
    }
    true = None
    for name, way in ways.items():
        training = in_flight()
        way(training)
        assert len(training.seen) == 2, name
        true = true or training.seen[1]
        assert same(training.seen[1], true), name
        if name not in ("participants",):
            assert same(training.parameters, true), name
        training.step.settle()
        assert len(training.seen) == 2, name
    training = Training(Plan((), 2))
    for index in training.step.over(range(9)):
        training.step(index)
        if index == 5:
            break
    assert same(training.parameters, true), "left by break"


def freeze_and_call(training: Training) -> None:
    training.model.never.requires_grad_(False)
    training.step(6)
    assert training.step.progress.index == 1


def resumed() -> None:
    """From a state in the middle of a window, while another was travelling, on as without it, to the bit."""
    one = in_flight(num_more=1)
    state, model, optimizer, scheduler = (
        x.state_dict() for x in (one.step, one.model, one.optimizer, one.scheduler)
    )
    state, model, optimizer = (torch.utils._pytree.tree_map(copied, x) for x in (state, model, optimizer))
    assert state["windows"][0]["updates"] == 2 and state["windows"][0]["index"] == 1
    two = Training(Plan((), 2))
    two.model.load_state_dict(model)
    two.optimizer.load_state_dict(optimizer)
    two.scheduler.load_state_dict(scheduler)
    two.step.load_state_dict(state)
    for training in (one, two):
        for index in range(7, 14):
            training.step(index)
        training.step.flush()
    assert same(one.parameters, two.parameters)
    assert one.step.progress.updates == two.step.progress.updates == 5


def copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def two_functions() -> None:
    """Another function's window on the same parameters begins from true ones."""
    training = in_flight()
    found = []

    @gradsync.accumulating(2)
    def other(model, optimizer):
        found.append(training.parameters)
        return model.loss(training.rank, 50)

    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    other(training.model, optimizer)
    assert len(training.seen) == 2 and same(found[0], training.seen[1])
    other(training.model, optimizer)
    assert other.progress.updates == 1


def told_when_landed() -> list[tuple[int, int, int]]:
    """(index of the call, updates that `progress` knows, updates of the scheduler) after each call."""
    training, told = Training(Plan((), 2)), []
    for index in range(9):
        training.step(index)
        progress = training.step.progress
        assert progress.window == (index + 1) // 3
        assert progress.stepped == (progress.updates > (told[-1][1] if told else 0))
        told.append((index, progress.updates, training.scheduler.last_epoch))
    training.step.flush()
    told.append((9, training.step.progress.updates, training.scheduler.last_epoch))
    assert [progress.loss is not None for progress in training.told] == [True] * 3
    return told


def saves_in_on_update(m: int) -> None:
    """In on_update the model's state is the true one; the function's own state there lands what had just left."""
    training = Training(Plan((), m))
    states = []
    note = training.note

    def saving(progress):
        note(progress)
        states.append({name: value.clone() for name, value in training.model.state_dict().items()})
        if progress.updates == 2:
            assert training.step.state_dict()["windows"][0]["updates"] == (3 if m == 3 else 2)

    other = Training(Plan((), m))
    for one in (training, other):
        if one is training:
            one.note = saving
        one.step = decorated(one, m)
        for index in one.step.over(range(12)):
            one.step(index)
    assert len(training.seen) == len(other.seen) == 4
    assert all(same(seen, state.values()) for seen, state in zip(training.seen[:2], states[:2]))
    assert same(training.seen[1], other.seen[1])


def closes_late(m: int) -> None:
    """A loop that was left, and whose generator ends in the middle of the next loop, lands nothing of that one."""
    seen = []
    for at in (5, 11):
        training = Training(Plan((), m))
        left = iter(training.step.over(range(6)))
        for index in left:
            training.step(index)
            if index == 2:
                break
        seen.append([])
        for index in training.step.over(range(3, 12)):
            training.step(index)
            if index == at:
                left.close()
            seen[-1].append(training.parameters)
    assert all(map(same, *seen))


def flushes_in_on_update(m: int, lengths: tuple[int, int]) -> str:
    """The next window is open there."""
    training = Training(Plan((), m))
    training.note = lambda _: training.step.flush()
    training.step = decorated(training, m)
    with pytest.raises(GradSyncError) as caught:
        for index in training.step.over(range(lengths[training.rank])):
            training.step(index)
    training.step.settle()  # between two calls, on all ranks, there is nothing against it
    return str(caught.value)


def collectives_in_on_update(m: int, lengths: tuple[int, int], known: bool) -> None:
    """On ranks of unequal length they meet each other, and not those of a boundary."""
    training, sums = Training(Plan((), m)), []

    def note(_):
        here = torch.tensor([training.rank + 1.0])
        dist.all_reduce(here)
        sums.append(here.item())

    training.note = note
    training.step = decorated(training, m)
    items = range(lengths[training.rank])
    for index in training.step.over(items if known else iter(items)):
        training.step(index)
    assert sums == [3.0] * -(-max(lengths) // 3)


def raises_where_it_is_not_finite(m: int, lengths: tuple[int, int]) -> str:
    training = Training(Plan((), m, infinite=((1, 1),)))
    step = gradsync.accumulating(
        3, model=training.model, optimizer=training.optimizer, overlap=m, nonfinite="raise"
    )(training.step.__wrapped__)  # fmt: skip
    with pytest.raises(GradSyncError) as caught:
        for index in step.over(range(lengths[training.rank])):
            step(index)
    step.settle()
    return str(caught.value)


def decorated(training: Training, m: int):
    @gradsync.accumulating(
        3, model=training.model, optimizer=training.optimizer, overlap=m, on_update=training.note
    )
    def step(index):
        return training.model.loss(training.rank, index)

    return step


def a_write_is_an_error() -> str:
    training = in_flight()
    with torch.no_grad():
        training.model.extra.data = training.model.extra + 1  # which no version tells of
    with pytest.raises(GradSyncError, match="extra was written to"):
        training.step.settle()
    training.step.settle()
    training = in_flight()
    with torch.no_grad():
        training.model.extra.add_(1)
    with pytest.raises(GradSyncError) as caught:
        training.step.settle()
    assert same(training.parameters, training.seen[0])
    training.step.settle()  # it is not lost
    assert len(training.seen) == 2
    return str(caught.value)


class Failing(torch.optim.lr_scheduler.LambdaLR):
    """Its third step raises: torch makes the first."""

    def __init__(self, optimizer):
        self.num_steps = 0
        super().__init__(optimizer, lambda _: 1.0)

    def step(self, *args):
        self.num_steps += 1
        if self.num_steps == 3:
            raise KeyError
        super().step(*args)


def a_scheduler_that_raises(m: int) -> tuple[list[int], list[tuple[int, int]], tuple[int, int]]:
    """The call that it raised in, and (updates, skipped) after each call: with an update that was made."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, numbers, raised = Failing(optimizer), [], []

    @gradsync.accumulating(2, overlap=m)
    def step(model, optimizer, scheduler, index):
        return mean_loss(model, micro_batch(dist.get_rank(), index))

    for index in range(8):
        try:
            step(model, optimizer, scheduler, index)
        except KeyError:
            raised.append(index)
        numbers.append((step.progress.updates, step.progress.skipped))
    step.flush()
    return raised, numbers, (step.progress.updates, step.progress.skipped)


def dropped() -> dict[str, bool]:
    """A model and its optimizer that go while gradients travel are freed, and the warning says what is lost."""
    freed = {}
    for wrap in (lambda model: model, DDP):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        home = wrap(model)

        @gradsync.accumulating(2, overlap=2)
        def step(model, optimizer, index):
            return mean_loss(model, micro_batch(dist.get_rank(), index))

        for index in range(2):
            step(home, optimizer, index)
        refs = [weakref.ref(one) for one in (optimizer, model, home, *model.parameters())]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del model, optimizer, home
            gc.collect()
        assert len(caught) == 1 and "still travelling" in str(caught[0].message)
        freed[wrap.__name__] = all(ref() is None for ref in refs)
    return freed


def alone() -> int:
    """How many windows of a DDP on one rank are taken to travel."""
    ddp = DDP(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    @gradsync.accumulating(2, overlap=1)
    def step(model, optimizer, index):
        return mean_loss(model, micro_batch(0, index))

    for index in range(4):
        step(ddp, optimizer, index)
    return vars(ddp).get(NUM_TRAVELLING, 0)


def left_behind() -> list[str]:
    gc.collect()  # functions of earlier cases, which may have a warning of their own to give
    training = in_flight()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.step = None
        gc.collect()
    assert same(training.parameters, training.seen[0])
    training.model.state_dict()  # nothing is left in it
    return [str(one.message) for one in caught]


WRAPPED = (
    lambda model: model,
    DDP,
    lambda model: DDP(model, gradient_as_bucket_view=True),
    lambda model: torch.compile(model, backend="eager"),
)


def on_a_ddp_of_the_users() -> None:
    """The same parameters as with the bare model, to the bit; compiled too."""
    found = []
    for wrap in WRAPPED:
        torch.manual_seed(3)
        model = small_model(torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        wrapped = wrap(model)

        @gradsync.accumulating(2, overlap=1)
        def step(model, optimizer, index):
            return mean_loss(model, micro_batch(dist.get_rank(), index))

        for index in step.over(range(7 + dist.get_rank())):
            step(wrapped, optimizer, index)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(same(one, found[0]) for one in found)


def a_rate_of_the_users() -> None:
    """What the user sets in flight is what the landing steps with, and it stays."""
    training = in_flight()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    training.step.settle()
    assert len(training.seen) == 2 and same(training.seen[1], training.seen[0])
    assert [group["lr"] for group in training.optimizer.param_groups] == [0.0]


def without_overlap() -> set[str]:
    """The files whose lines run in windows without overlap."""
    gc.collect()  # what earlier cases have left may be asked, as long as it is there
    training, files = Training(Plan((), 0)), set()
    sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
    try:
        for index in training.step.over(range(7)):
            training.step(index)
    finally:
        sys.setprofile(None)
    assert len(training.seen) == 3
    return files


def refused() -> dict[str, str]:
    """Where it cannot be: a sentence on every rank, in the first call."""
    found = {}
    for name, make, options in (
        ("replicate", replicate, {"overlap": 1}),
        ("find_unused", lambda model: DDP(model, find_unused_parameters=True), {"overlap": 1}),
        ("static", lambda model: DDP(model, static_graph=True), {"overlap": 1}),
        ("hook", lambda model: gradsync.ddp(model, compress="bf16"), {"overlap": 1}),
        ("scaler", lambda model: model, {"overlap": 1, "scaler": torch.amp.GradScaler("cpu")}),
        ("compress", DDP, {"compress": "bf16"}),
        ("compress and overlap", DDP, {"compress": "bf16", "overlap": 1}),
        ("differing", lambda model: model, {"overlap": 1 + dist.get_rank()}),
    ):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @gradsync.accumulating(2, **options)
        def step(model, optimizer, index):
            return mean_loss(model, micro_batch(dist.get_rank(), index))

        wrapped = make(model)
        with pytest.raises(GradSyncError) as caught:
            for index in range(2):
                step(wrapped, optimizer, index)
        found[name] = str(caught.value)
    return found


def audited(m: int) -> dict[str, object]:
    """A provisional step is no missed synchronisation, nor is a landing in the middle of a window, nor a waste."""
    training = Training(Plan((), m))
    training.step(0)  # makes the engine
    training.step.reset()
    with gradsync.audit(training.model, training.optimizer) as report:
        for index in range(12):
            training.step(index)
        training.step.settle()
    kept = {"syncs": report.syncs, "updates": report.updates, "backwards": report.backwards}
    return kept | {"missed": report.missed, "wasted": report.wasted, "discarded": report.discarded}


def compressed(overlap: int, dtype: str) -> float:
    """One window's gradients in bfloat16, from SGD with lr 1; the largest relative error. None where nobody used it."""
    dtype = getattr(torch, dtype)
    model = Model(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = []

    @gradsync.accumulating(2, compress="bf16", overlap=overlap, on_update=lambda _: seen.append(list(model.parameters())))
    def step(model, optimizer, index):
        return model.loss(rank, index)

    hooked = []
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda p: hooked.append(p))
    # What each rank brings, on this process.
    shares = []
    for other in range(size):
        loss = sum(model.loss(other, index) / 2 for index in range(2))
        shares.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    for index in step.over(range(2)):
        step(model, optimizer, index)
    worst = 0.0
    for p, was, parts in zip(model.parameters(), before, zip(*shares), strict=True):
        if all(part is None for part in parts):
            assert torch.equal(p, was)
            continue
        parts = [torch.zeros_like(p) if part is None else part for part in parts]
        exact = sum(parts) / size
        moved = was - p.detach()
        rounded = [part.bfloat16() / size for part in parts]
        if size == 2:  # a sum of two has one order
            torch.testing.assert_close(moved, (rounded[0] + rounded[1]).to(dtype), rtol=1e-4, atol=1e-6)
        worst = max(worst, float((moved - exact).norm() / exact.norm()))
    engine_ddp = behind(model)
    assert engine_ddp is not None and len(engine_ddp._comm_hooks) == 1
    return worst


def not_compressed_afterwards() -> None:
    """The hook stays on the DDP behind a model, and does nothing for a function that does not compress."""
    model, other = Model(torch.float32), Model(torch.float32)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]

    def loss(model, optimizer, index):
        return model.loss(dist.get_rank(), index)

    small, exact = gradsync.accumulating(1, compress="bf16")(loss), gradsync.accumulating(1)(loss)
    small(model, optimizers[0], 0)
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters()):
            p.copy_(q)
    for one, optimizer in zip((model, other), optimizers):
        exact(one, optimizer, 1)
    assert same(model.parameters(), other.parameters())


def flags_are_not_cast() -> list[set[torch.dtype]]:
    """The dtypes in which buckets travel under compress, in each call of a window: bfloat16, and the ledger's own."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent, all_reduce = [], dist.all_reduce

    def noted(tensor, *args, **kwargs):
        sent[-1].add(tensor.dtype)
        return all_reduce(tensor, *args, **kwargs)

    @gradsync.accumulating(2, compress="bf16")
    def step(model, optimizer):
        return model(torch.ones(1, 2)).sum()

    step(model, optimizer)
    step(model, optimizer)
    dist.all_reduce = noted
    try:
        for _ in range(2):
            sent.append(set())
            step(model, optimizer)
    finally:
        dist.all_reduce = all_reduce
    return sent
