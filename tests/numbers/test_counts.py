"""Counts of a LossSum are numbers: of any dtype, added exactly, wherever they are kept."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync import LossSum
from tests.support.models import small_model
from tests.support.reference import cut, sum_loss, train
from tests.support.reference import micro_batch
from tests.support.traps import Trap
from tests.support.verdicts import ENGINES, FullRecorder, compare, exact, items_of_rank, on_engine, refused, verdict, verdicts

# What goes wrong where such counts are added in their own dtype: rounding, wrapping, or three Trues that are one.
COUNTS = {
    "int": (None, [3, 1, 4, 1, 5]),
    "float": (None, [0.1, 0.7, 2.5, 0.3, 0.2]),
    "bool": (torch.bool, [True, True, True, False, True]),
    "uint8": (torch.uint8, [200, 100, 255, 3, 250]),
    "int8": (torch.int8, [100, 100, 127, 3, 120]),
    "int16": (torch.int16, [30000, 20000, 32767, 1, 32000]),
    "int32": (torch.int32, [2**31 - 1, 2**31 - 1, 2**31 - 2, 7, 2**31 - 3]),
    "int64": (torch.int64, [2**40, 3, 2**41, 7, 1]),
    "float16": (torch.float16, [2048, 1, 1, 1, 3]),
    "float16, large": (torch.float16, [60000, 60000, 60000, 60000, 60000]),
    "bfloat16": (torch.bfloat16, [256, 1, 1, 1, 3]),
    "float32": (torch.float32, [2**24, 1, 1, 1, 3]),
    "float64": (torch.float64, [0.1, 0.7, 2.5, 0.3, 0.2]),
}
LENGTHS = {1: [5], 2: [5, 3], 3: [5, 2, 4]}
EVEN = {size: [4] * size for size in LENGTHS}  # without .over every rank closes the same number of windows


def number(kind: str, rank: int, index: int):
    """The count as the user has it: the ranks begin at different places."""
    dtype, values = COUNTS[kind]
    value = values[(index + rank) % len(values)]
    if dtype is None:
        return value
    tensor = torch.tensor(value, dtype=dtype)
    return tensor.reshape(1) if index % 2 else tensor  # of one element, or a scalar


def over(step, home, optimizer, count_of, data: list, steps: int) -> None:
    for i, x in step.over(data):
        step(i, x)


def flush(step, home, optimizer, count_of, data: list, steps: int) -> None:
    for i, x in data:
        step(i, x)
    step.flush()


def sync_every(step, home, optimizer, count_of, data: list, steps: int) -> None:
    for micro, (i, x) in gradsync.sync_every(home, steps, data):
        micro.backward(sum_loss(home, x), count=count_of(i))
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()


def updates(engine: str, loop, lengths, count_of, steps: int = 4):
    """The gradients of each update of one loop."""
    home = on_engine(small_model(), engine)
    optimizer = FullRecorder(home.parameters(), lr=1e-3)
    step = gradsync.accumulating(steps=steps, model=home, optimizer=optimizer)(
        lambda i, x: LossSum(sum_loss(home, x), count_of(i))
    )
    loop(step, home, optimizer, count_of, list(enumerate(items_of_rank(lengths))), steps)
    return optimizer.seen


def reference(lengths, value_of, steps: int = 4):
    def whole(model, window):
        total = sum(float(value_of(r, i)) for r, i in window)
        return sum(sum_loss(model, micro_batch(r, i)) for r, i in window) / total if total else None

    return train(small_model(), cut(lengths, steps), whole, lr=1e-3)[0]


def of_every_dtype(engine: str, kind: str):
    rank, size = dist.get_rank(), dist.get_world_size()

    def run():
        for loop, lengths in ((over, LENGTHS[size]), (sync_every, LENGTHS[size]), (flush, EVEN[size])):
            seen = updates(engine, loop, lengths, lambda i: number(kind, rank, i))
            compare(seen, reference(lengths, lambda r, i: number(kind, r, i)))

    return verdict(run)


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize(("engine", "size"), [*((one, 2) for one in ENGINES), ("bare", 1), ("bare", 3)])
def test_counts_of_every_dtype(ranks, engine, size, kind):
    """The gradient is that of all sums over all counts, added as numbers and not in the dtype they came in."""
    exact(verdicts(ranks(size), of_every_dtype, engine, kind))


def of_many_ones(dtype: torch.dtype):
    """As many ones as an epoch has: bfloat16 stays at 256, float16 at 2048."""
    one, num = torch.ones((), dtype=dtype), 2100
    return verdict(
        lambda: compare(
            updates("bare", over, [num] * dist.get_world_size(), lambda i: one, steps=num),
            reference([num] * dist.get_world_size(), lambda r, i: 1, steps=num),
            1e-9,
        )
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
def test_many_ones(ranks, dtype):
    exact(verdicts(ranks(1), of_many_ones, dtype))


def refilled(engine: str, loop, lengths: list[int]):
    """The user counts in one buffer, which is filled anew for each micro-batch."""
    rank, buffer = dist.get_rank(), torch.zeros((), dtype=torch.float32)
    value = lambda r, i: 1 + (2 * r + 3 * i) % 7  # noqa: E731
    return verdict(
        lambda: compare(updates(engine, loop, lengths, lambda i: buffer.fill_(value(rank, i))), reference(lengths, value))
    )


@pytest.mark.parametrize(("loop", "lengths"), [(over, LENGTHS), (flush, EVEN), (sync_every, LENGTHS)])
@pytest.mark.parametrize(("engine", "size"), [*((one, 2) for one in ENGINES), ("bare", 1), ("bare", 3)])
def test_a_tensor_that_is_refilled(ranks, engine, size, loop, lengths):
    """Counts are values: what the tensor holds later has no effect."""
    exact(verdicts(ranks(size), refilled, engine, loop, lengths[size]))


def zeros(engine: str, loop):
    """The first window counts nothing anywhere; the second only on the last rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = [8] * size
    value = lambda r, i: i - 3 if i >= 4 and r == size - 1 else 0  # noqa: E731
    return verdict(
        lambda: compare(
            [
                grads
                for grads in updates(engine, loop, lengths, lambda i: torch.tensor(value(rank, i)))
                if any(one is not None for one in grads)  # sync_every leaves the step to the user: on no gradients
            ],
            reference(lengths, value),
        )
    )


@pytest.mark.parametrize("loop", [over, flush, sync_every])
@pytest.mark.parametrize(("engine", "size"), [*((one, 2) for one in ENGINES), ("bare", 1), ("bare", 3)])
def test_counts_that_add_up_to_zero(ranks, engine, size, loop):
    """A window that counted nothing makes no update; a rank that counted nothing weighs nothing."""
    exact(verdicts(ranks(size), zeros, engine, loop))


BAD = {
    "nan": math.nan,
    "inf": math.inf,
    "negative": -1,
    "nan tensor": torch.tensor(math.nan),
    "inf tensor": torch.tensor(math.inf, dtype=torch.bfloat16),
    "negative tensor": torch.tensor(-2),
}


def bad_on_one(engine: str, loop, kind: str, place: int):
    """The last rank alone has a count that is none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bad = lambda i: BAD[kind] if rank == size - 1 and i == place else 2  # noqa: E731
    return verdict(lambda: updates(engine, loop, [5] * size, bad))


@pytest.mark.parametrize("place", [1, 3], ids=["held", "boundary"])
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize(
    ("engine", "size", "loop"),
    [("bare", 1, over), ("bare", 2, over), ("ddp", 2, flush), ("find_unused", 2, sync_every), ("bare", 3, over)],
)
def test_a_count_that_is_none_on_one_rank(ranks, engine, size, loop, kind, place):
    """NaN, infinite and negative counts are an error on every rank: the others do not wait for the one that has it."""
    refused(verdicts(ranks(size), bad_on_one, engine, loop, kind, place), "count")


def bad_on_one_and_a_failure_on_the_other():
    """Buffers are there too: after a table that is an error, no rank waits for them."""
    rank, model = dist.get_rank(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @gradsync.accumulating(steps=lambda window: 2, skip=ValueError)
    def step(model, optimizer, i):
        loss = model(torch.eye(2)).sum()
        return gradsync.LossSum(Trap.apply(loss, ArithmeticError()) if (rank, i) == (0, 1) else loss, math.nan if rank else 2)

    try:
        for i in range(2):
            step(model, optimizer, i)
    except (ArithmeticError, gradsync.GradSyncError) as error:
        said = type(error).__name__
    dist.monitored_barrier()  # a rank that still waits for buffers would not come to it
    return said


def test_a_count_that_is_none_where_another_rank_fails(ranks):
    assert ranks(2).run(bad_on_one_and_a_failure_on_the_other) == ["ArithmeticError", "GradSyncError"]
