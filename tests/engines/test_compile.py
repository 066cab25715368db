"""torch.compile on every engine."""

from __future__ import annotations

import warnings

import pytest
import torch

import gradsync
from tests.support.compare import assert_equal_states
from tests.support.homes import HOMES, home_of
from tests.support.training import Run, reference


def compiled(engine: str) -> None:
    """No graph is made after the second window."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    home = home_of(engine)
    home.inside = home.net
    home.model = torch.compile(home.model, backend="eager")
    run = Run(home)
    for index in range(6):
        run(index)
    before = counters["stats"]["unique_graphs"], counters["frames"]["total"]
    assert before[0] > 0
    for index in range(6, 15):
        run(index)
    assert (counters["stats"]["unique_graphs"], counters["frames"]["total"]) == before
    assert_equal_states(run.states, reference(home, [range(start, start + 3) for start in range(0, 15, 3)]))


FSDP2 = ["fsdp2", "fsdp2_gathered", "replicate_fsdp"]


@pytest.mark.parametrize(
    "engine", ["none", "bare", "ddp", "replicate", "fsdp1_full_orig", *FSDP2, "hsdp_window", "hsdp_shard", "hsdp_each"]
)
def test_compiled_models_are_not_compiled_again(ranks, engine):
    """After the second window."""
    ranks(HOMES[engine].ranks).run(compiled, engine)


def compiled_once() -> int:
    """How often a bare model is compiled in a loop that never changes; a warning of torch's is an error here."""
    made = []

    def backend(graph, _):
        made.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=backend)

    @gradsync.accumulating(steps=2)
    def step(compiled, optimizer, x):
        return compiled(x).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in step.over(torch.ones(6, 4, 3)):
            step(compiled, optimizer, x)
    return len(made)


def test_a_compiled_bare_model_is_compiled_once(ranks):
    assert ranks(2).run(compiled_once) == [1, 1]
