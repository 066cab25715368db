"""How a micro-batch's backward runs: by torch's engine, without the checks of a gradient that is ours."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.autograd import graph

from gradsync.functional._team import backward as _backward
from gradsync.functional._team.backward import HELD, backward
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch


def test_torch_has_what_is_called() -> None:
    """It is private. Without it `loss.backward` runs, which is slower: then this test tells."""
    assert list(inspect.signature(graph._engine_run_backward).parameters) == ["t_outputs", "args", "kwargs"]


def gradients(seed: torch.Tensor | None, run) -> list[torch.Tensor | None]:
    model = small_model()
    run(mean_loss(model, micro_batch(0, 0)), seed)
    return [parameter.grad for parameter in model.parameters()]


def ours(loss: torch.Tensor, seed: torch.Tensor | None) -> None:
    backward(loss, HELD, seed)


@pytest.mark.parametrize("seed", [None, torch.tensor(0.25, dtype=torch.float64)], ids=["1", "0.25"])
@pytest.mark.parametrize("lacks", [False, True])
def test_it_is_the_backward_of_the_loss(monkeypatch, lacks, seed) -> None:
    """Bitwise, also where torch has no such function."""
    by_hand = gradients(seed, torch.Tensor.backward)
    if lacks:
        monkeypatch.setattr(_backward, "_RUN", None)
    for one, other in zip(gradients(seed, ours), by_hand, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
