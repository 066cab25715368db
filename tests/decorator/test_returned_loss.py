"""What the function returns comes back, its loss detached."""

from __future__ import annotations

import types
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gradsync import LossSum, accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean


@dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor


@dataclass
class Output:
    loss: torch.Tensor
    logits: object = None


Named = namedtuple("Named", "loss rest")


Pair = namedtuple("Pair", "first second")


class Readonly:
    def __init__(self, loss):
        self._loss = loss

    @property
    def loss(self):
        return self._loss


SHAPES = {
    "tensor": (lambda l: l, lambda r: r),
    "tuple": (lambda l: (l, "x"), lambda r: r[0]),
    "list": (lambda l: [l, "x"], lambda r: r[0]),
    "dict": (lambda l: {"loss": l}, lambda r: r["loss"]),
    "mappingproxy": (lambda l: types.MappingProxyType({"loss": l}), lambda r: r["loss"]),
    "object": (lambda l: Output(l), lambda r: r.loss),
    "frozen": (lambda l: Frozen(l), lambda r: r.loss),
    "named": (lambda l: Named(l, 1), lambda r: r.loss),
    "named by place": (lambda l: Pair(l, 1), lambda r: r.first),
    "property": (lambda l: Readonly(l), lambda r: r.loss),
    "LossSum": (lambda l: LossSum(l, 1), lambda r: r.loss),
    "LossSum in a dict": (lambda l: {"loss": LossSum(l, 1)}, lambda r: r["loss"].loss),
}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_object_comes_back_its_loss_detached(shape, view):
    pack, unpack = SHAPES[shape]
    returned = []

    @accumulating(steps=2)
    def step(model, optimizer, x):
        loss = mean_loss(model, x)
        loss = loss.reshape(1)[0] if view else loss
        returned.append(pack(loss))
        return returned[-1]

    model = small_model()
    optimizer = Recorder(model.parameters())
    values = []
    for i in range(2):
        result = step(model, optimizer, micro_batch(0, i))
        loss = unpack(result)
        assert loss.grad_fn is None and not loss.requires_grad
        values.append(loss.item())
        if not view:
            assert result is returned[-1]
        elif shape not in {"tensor", "tuple", "LossSum"}:
            assert result is returned[-1]
    expected, _ = train(small_model(), cut([2], 2), window_mean)
    assert_equal_updates(optimizer.seen, expected)
    assert values[0] == pytest.approx(mean_loss(small_model(), micro_batch(0, 0)).item(), abs=0)


def test_a_one_element_loss_will_do():
    @accumulating(steps=1)
    def step(model, optimizer, x):
        return mean_loss(model, x).reshape(1)

    model = small_model()
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 0))
    assert_equal_updates(optimizer.seen, train(small_model(), cut([1], 1), window_mean)[0])


def test_writing_to_the_returned_loss_leaves_progress_alone():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    total = 0.0
    for i in range(2):
        loss = step(model, optimizer, micro_batch(0, i))
        total += loss.item()
        loss.zero_()
    assert step.progress.loss.item() == pytest.approx(total / 2, rel=1e-12)


def test_a_parameter_that_is_the_loss_stays_a_parameter():
    """In a frozen thing its detached self cannot take its place."""

    class Price(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(3.0))

    model = Price()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = accumulating(steps=2)(lambda model, optimizer: Frozen(model.weight))
    for _ in range(4):
        assert step(model, optimizer).loss is model.weight
    assert model.weight.requires_grad and model.weight.item() == 2.0
