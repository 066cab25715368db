"""Parameters that do not lie row by row (`channels_last`), from the first or from some time on, and complex ones."""

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


ROWS, LAST = torch.contiguous_format, torch.channels_last
# The layouts that a model is given before it is wrapped, once it is, and between two windows.
LAYOUTS = {
    "from the first": [LAST, None, None], "once wrapped": [None, LAST, None], "between windows": [None, None, LAST],
    "until then": [LAST, None, ROWS],
}  # fmt: skip


def lay_out(model: nn.Module, layout: torch.memory_format | None) -> None:
    if layout is not None:
        model.to(memory_format=layout)


def laid_out(wrap: str, when: str, lengths: list[int]) -> None:
    """Two loops; the model comes into its layout, or out of it, at some time."""
    rank, model = dist.get_rank(), convolution()
    expected = states(model, cut(lengths, 2) * 2, window_mean)
    first, once_wrapped, between = LAYOUTS[when]
    lay_out(model, first)
    options = WRAPS[wrap]
    home = model if options is None else DDP(model, **options)
    lay_out(model, once_wrapped)
    seen = []

    @accumulating(steps=2, on_update=lambda _: seen.append(copy.deepcopy(dict(model.named_parameters()))))
    def step(model, optimizer, x):
        return mean_loss(model, x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loop in range(2):
        for x in step.over([images(rank, i) for i in range(lengths[rank])]):
            step(home, optimizer, x)
        if loop == 0:
            lay_out(model, between)
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("when", LAYOUTS)
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


class Complex(nn.Module):
    """With complex parameters, or with the same numbers in pairs of real ones."""

    def __init__(self, *, in_pairs: bool) -> None:
        super().__init__()
        weight, scale = rows_of(3, 6, 2), rows_of(4, 2, 2)
        self.in_pairs = in_pairs
        self.weight, self.scale = (
            nn.Parameter(pairs if in_pairs else torch.view_as_complex(pairs)) for pairs in (weight, scale)
        )

    def forward(self, x):
        weight, scale = self.pairs().values()
        y = x.to(torch.complex128) @ torch.view_as_complex(weight).view(3, 2)
        return torch.view_as_real(y * torch.view_as_complex(scale))

    def pairs(self) -> dict[str, torch.Tensor]:
        return {name: p if self.in_pairs else torch.view_as_real(p) for name, p in self.named_parameters()}


def as_in_pairs(wrap: str, lengths: list[int], steps: int, overlap: int) -> None:
    ends, rank = [], dist.get_rank()
    for in_pairs in (True, False):
        model = Complex(in_pairs=in_pairs)
        home = model if WRAPS[wrap] is None else DDP(model, **WRAPS[wrap])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        step = accumulating(steps=steps, overlap=overlap)(lambda model, optimizer, x: mean_loss(model, x))
        for x in step.over([rows_of(1000 * rank + i, 4) for i in range(lengths[rank])]):
            step(home, optimizer, x)
        ends.append({name: pairs.detach() for name, pairs in model.pairs().items()})
    torch.testing.assert_close(*ends, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("wrap", "overlap"), [("static", 0), ("ddp", 0), ("bare", 0), ("bare", 1), ("ddp", 2), ("views", 1)]
)
def test_complex_numbers_are_pairs(ranks, wrap, overlap):
    for lengths in ([4, 4], [5, 2]):
        ranks(2).run(as_in_pairs, wrap, lengths, 2, overlap)
