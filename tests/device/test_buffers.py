"""Buffers that a forward resizes, on a device: the host hears one window later what the others have, and never waits."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from tests.device import run_on_device, waits
from tests.device.test_device import RATE, batch, ddp, small_model

STEPS, WINDOWS = 2, 7

# How many rows `rows` has after a micro-batch, on one rank.
ROWS = {
    "never": lambda rank, index: 1,  # noqa: ARG005
    "alike, once": lambda rank, index: 1 if index < 6 else 4,  # noqa: ARG005
    "alike, always": lambda rank, index: 1 + index,  # noqa: ARG005
    "rank 1": lambda rank, index: 1 + rank * (index > 6),
    "rank 0": lambda rank, index: 1 + (1 - rank) * (index > 6),
    "each its own": lambda rank, index: 1 + (rank + 1) * index,
}

# In which windows `rows`, and in which `seen`, are those of rank 0 on all ranks. `rows` of other shapes never are.
SHARED = {
    "never": (range(7), range(7)),
    "alike, once": ((0, 1, 2, 4, 5, 6), (0, 1, 2, 4, 5, 6)),  # the first window that has others tells of them
    "alike, always": ((0, 2, 3, 4, 5, 6), (0, 2, 3, 4, 5, 6)),
    "rank 1": ((0, 1, 2), range(7)),
    "rank 0": ((0, 1, 2), (0, 1, 2, 4, 5, 6)),
    "each its own": ((), range(7)),  # as long as they differ, the ranks compare them each time
}


class Grows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = small_model()
        self.register_buffer("rows", torch.zeros(1, 3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.uint8))
        self.register_buffer("low", torch.zeros((), dtype=torch.bfloat16))

    def forward(self, x, rank: int, num_rows: int):
        if num_rows != len(self.rows):
            self.rows = torch.full((num_rows, 3), float(rank), dtype=torch.float64, device=x.device)
        self.rows += 10 + rank
        self.seen += 1 + rank
        self.low += 1 + rank
        return self.inner(x)


def grown(home: str, overlap: int) -> dict[str, tuple[list, list, int]]:
    """By kind: the buffers after each window, the parameters, and the waits after the first window."""
    import gradsync
    from tests.device.fake import catch_up

    warnings.simplefilter("ignore")
    rank, results = dist.get_rank(), {}
    for kind, num_rows in ROWS.items():
        bare = Grows().to("cuda")
        model = bare if home == "bare" else ddp(bare)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        step = gradsync.accumulating(STEPS, model=model, optimizer=optimizer, overlap=overlap)(
            lambda x, y, number: (model(x, rank, number) - y).square().mean()
        )
        states, num_waits = [], 0
        for index in range(STEPS * WINDOWS):
            item = [tensor.to("cuda") for tensor in batch(rank, index)]
            catch_up()
            with waits() as found:
                step(*item, num_rows(rank, index))
            num_waits += found.total() if index >= STEPS else 0
            if index % STEPS == STEPS - 1:
                states.append([buffer.cpu().clone() for buffer in bare.buffers()])
        step.settle()
        results[kind] = states, [p.detach().cpu() for p in bare.parameters()], num_waits
    return results


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("home", ["bare", "DDP"])
def test_buffers_that_grow_on_a_device(home, overlap):
    first, second = run_on_device(grown, home, overlap, ranks=2)
    for kind, (rows, seen) in SHARED.items():
        for window in range(WINDOWS):
            mine, theirs = first[kind][0][window], second[kind][0][window]
            for place, shared in enumerate((rows, seen, seen)):
                same = torch.equal(mine[place], theirs[place])
                assert same == (window in shared), f"{kind}, window {window}, buffer {place}: {mine[place]}, {theirs[place]}"
        assert all(torch.equal(p, q) for p, q in zip(first[kind][1], second[kind][1])), kind
        assert torch.equal(first[kind][1][0], first["never"][1][0]), kind
        for rank in (first, second):
            assert rank[kind][2] == 0, kind
    mine, theirs = first["never"][0][-1], second["never"][0][-1]
    assert torch.equal(theirs[1], torch.full((5,), STEPS * WINDOWS, dtype=torch.uint8)), "rank 0's"
