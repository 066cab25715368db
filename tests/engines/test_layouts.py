"""Parameters that do not lie row by row (`channels_last`): from the first, once wrapped, and from one window to the next."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import accumulating
from tests.support.reference import cut, mean_loss, rows_of, states

WRAPS = {"bare": None, "ddp": {}, "find_unused": {"find_unused_parameters": True}, "static": {"static_graph": True},
         "views": {"gradient_as_bucket_view": True}}  # fmt: skip


def convolution() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).double()


def images(rank: int, index: int) -> torch.Tensor:
    return rows_of(1000 * rank + index, 2, 48).view(2, 3, 4, 4)


def window_mean(model, window):
    return sum(mean_loss(model, images(*place)) for place in window) / len(window)


def laid_out(wrap: str, when: str, lengths: list[int]) -> None:
    """Two loops; the model comes into its layout, or out of it, at some time."""
    rank, model = dist.get_rank(), convolution()
    expected = states(model, cut(lengths, 2) * 2, window_mean)
    if when in {"from the first", "until then"}:
        model.to(memory_format=torch.channels_last)
    options = WRAPS[wrap]
    home = model if options is None else DDP(model, **options)
    if when == "once wrapped":
        model.to(memory_format=torch.channels_last)
    seen = []

    @accumulating(steps=2, on_update=lambda _: seen.append(copy.deepcopy(dict(model.named_parameters()))))
    def step(model, optimizer, x):
        return mean_loss(model, x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loop in range(2):
        for x in step.over([images(rank, i) for i in range(lengths[rank])]):
            step(home, optimizer, x)
        if loop == 0 and when == "between windows":
            model.to(memory_format=torch.channels_last)
        if loop == 0 and when == "until then":
            model.to(memory_format=torch.contiguous_format)
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("when", ["from the first", "once wrapped", "between windows", "until then"])
def test_another_layout_changes_no_number(ranks, wrap, when):
    for lengths in ([4, 4], [5, 2]):
        ranks(2).run(laid_out, wrap, when, lengths)


def overlapped(wrap: str, steps: int, overlap: int) -> None:
    """What lands is the same, whatever its layout."""
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = convolution().to(memory_format=layout)
        home = model if WRAPS[wrap] is None else DDP(model, **WRAPS[wrap])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = accumulating(steps=steps, overlap=overlap)(lambda model, optimizer, x: mean_loss(model, x))
        for i in range(4 * steps):
            step(home, optimizer, images(dist.get_rank(), i))
        step.settle()
        ends.append(dict(model.named_parameters()))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-11)


@pytest.mark.parametrize("wrap", ["bare", "ddp", "views"])
@pytest.mark.parametrize(("steps", "overlap"), [(1, 1), (3, 2)])
def test_what_travels_lands_in_its_layout(ranks, wrap, steps, overlap):
    ranks(2).run(overlapped, wrap, steps, overlap)
