"""The decorator that the docstring of `gradsync.functional` builds is right on one rank and on several."""

from __future__ import annotations

import ast
import doctest
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsync.functional
from tests.support.compare import assert_equal_states

STEPS, LR = 2, 0.1
LENGTHS = {1: [(5,), (4,), (1,), (0,)], 2: [(5, 3), (4, 4), (0, 3), (1, 4)], 3: [(5, 2, 4), (0, 1, 6), (3, 3, 3)]}


def accumulate():
    """The docstring's own function, made by its own lines."""
    examples = doctest.DocTestParser().get_examples(gradsync.functional.__doc__)
    lines = [one.source for one in examples if one.source.startswith(("from ", "def accumulate"))]
    assert len(lines) == 2, "the docstring has built another decorator otherwise"
    assert sum(map(len, (one.splitlines() for one in lines))) <= 34, "about thirty lines"
    made: dict = {"torch": torch}
    exec("".join(lines), made)  # noqa: S102
    return made["accumulate"]


def test_the_readme_shows_the_same_decorator():
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    [shown] = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def accumulate" in code]
    source = "".join(one.source for one in doctest.DocTestParser().get_examples(gradsync.functional.__doc__))
    both = [
        next(ast.dump(node) for node in ast.parse(code).body if getattr(node, "name", "") == "accumulate")
        for code in (shown, source)
    ]
    assert both[0] == both[1]


def batch(rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + index)
    return torch.randn(1 + (rank + index) % 3, 4, dtype=torch.float64, generator=generator)


def model_of() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()


def expected(lengths: tuple[int, ...], *, counted: bool) -> list[dict]:
    """One process, one big batch a window: the sum of all over the counts, or the mean of all micro-batches' means."""
    model = model_of()
    states = []
    for start in range(0, max(lengths), STEPS):
        rows = [
            batch(rank, index) for rank, n in enumerate(lengths) for index in range(start, min(start + STEPS, n))
        ]
        losses = [model(one).square() for one in rows]
        loss = torch.cat(losses).mean() if counted else torch.stack([one.mean() for one in losses]).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter -= LR * gradient
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states


def trained(home: str, lengths: tuple[int, ...], *, counted: bool, sized: bool) -> list[dict]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    inner = model_of()
    model = DistributedDataParallel(inner) if home == "ddp" else inner
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    states: list[dict] = []
    optimizer.register_step_post_hook(
        lambda *_: states.append({name: value.clone() for name, value in inner.state_dict().items()})
    )

    @accumulate()(STEPS, model, optimizer)
    def train(rows):
        squares = model(rows).square()
        return gradsync.functional.LossSum(squares.sum(), count=len(rows)) if counted else squares.mean()

    data = [batch(rank, index) for index in range(lengths[rank])]
    for rows in train.over(data if sized else iter(data)):
        train(rows)
    return states


def every_length(home: str, size: int) -> None:
    for lengths in LENGTHS[size]:
        for counted in (False, True):
            for sized in (True, False):
                states = trained(home, lengths, counted=counted, sized=sized)
                assert_equal_states(states, expected(lengths, counted=counted))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("home", ["bare", "ddp"])
def test_it_is_exact_with_tails_counts_and_ranks_that_differ(ranks, home, size):
    """Against one process in float64, whose gradients are those of one big batch a window."""
    ranks(size).run(every_length, home, size)
