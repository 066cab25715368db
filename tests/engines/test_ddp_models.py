"""DDP around and behind models of every kind, against float64: checkpointed, compiled, sparse, static, in parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import Checkpointed, Sparse, WithBuffers, small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train


@dataclass
class Setting:
    """A model, what the step is called with in its place, and the loss that the body takes of that."""

    model: nn.Module
    home: nn.Module
    loss_of: Callable = mean_loss


def around(wrap: str, model: nn.Module, **options) -> Setting:
    return Setting(model, DDP(model, **options) if wrap == "ddp" else model)


def static(wrap: str) -> Setting:
    return around(wrap, small_model(), static_graph=True)


def cast_once_wrapped(wrap: str) -> Setting:
    """The reducer's hooks are on nodes that autograd no longer uses, and before the first call nothing tells."""
    setting = around(wrap, small_model().float())
    setting.model.double()
    return setting


def cast_and_back_once_wrapped(wrap: str) -> Setting:
    setting = around(wrap, small_model())
    setting.model.float()
    setting.model.double()
    return setting


def marked_for_ddp_to_ignore(wrap: str) -> Setting:
    """torch's mark says what DDP leaves out; what the optimizer steps is synchronised all the same."""
    model = small_model()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    return around(wrap, model)


def with_other_storage_once_wrapped(wrap: str) -> Setting:
    setting = around(wrap, small_model())
    with torch.no_grad():
        setting.model[0].weight.set_(setting.model[0].weight.clone())
    return setting


def static_unused(wrap: str) -> Setting:
    return around(wrap, small_model(unused=True), static_graph=True)


def static_reentrant(wrap: str) -> Setting:
    return around(wrap, Checkpointed(True), static_graph=True)


def reentrant(wrap: str) -> Setting:
    return around(wrap, Checkpointed(True))


def not_reentrant(wrap: str) -> Setting:
    return around(wrap, Checkpointed(False))


def sparse(wrap: str) -> Setting:
    return around(wrap, Sparse())


def ddp_of_compiled(wrap: str) -> Setting:
    model = small_model()
    return Setting(model, DDP(torch.compile(model, backend="aot_eager")))


def compiled_ddp(wrap: str) -> Setting:
    model = small_model()
    return Setting(model, torch.compile(DDP(model), backend="aot_eager"))


def compiled_bare(wrap: str) -> Setting:
    model = small_model()
    return Setting(model, torch.compile(model, backend="aot_eager"))


def inside(wrap: str) -> Setting:
    model = small_model()
    return Setting(model, nn.Sequential(DDP(model)))


def partly_inside(wrap: str) -> Setting:
    """DDP around one layer, the rest bare."""
    model = small_model()
    return Setting(model, nn.Sequential(DDP(model[0]), model[1], model[2]))


def several(wrap: str) -> Setting:
    model = small_model()
    return Setting(model, nn.Sequential(DDP(model[0]), model[1], DDP(model[2])))


def method(wrap: str) -> Setting:
    model = WithBuffers().eval()
    return Setting(model, model, lambda m, x: m.loss(x))


def sub_module(wrap: str) -> Setting:
    model = WithBuffers().eval()
    return Setting(model, model, lambda m, x: mean_loss(m.inner, m.norm(x)))


def bypassed(wrap: str) -> Setting:
    """The body goes past DDP, to the module in it; the reference has no DDP to go past."""
    model = small_model()
    return Setting(model, DDP(model), lambda m, x: mean_loss(getattr(m, "module", m), x))


def two_forwards(wrap: str) -> Setting:
    setting = around(wrap, small_model())
    setting.loss_of = lambda m, x: (mean_loss(m, x[:2]) + mean_loss(m, x[2:])) / 2
    return setting


def exact(make: Callable[[str], Setting], wrap: str, lengths: list[int]) -> None:
    """Full windows and tails are those of one big batch."""
    rank = dist.get_rank()
    torch.manual_seed(7)
    setting = make(wrap)
    twin = copy.deepcopy(setting.model)
    optimizer = Recorder(setting.model.parameters())
    step = accumulating(steps=3)(lambda model, optimizer, x: setting.loss_of(model, x))
    for x in step.over([micro_batch(rank, i) for i in range(lengths[rank])]):
        step(setting.home, optimizer, x)
    if isinstance(twin, Checkpointed):
        twin = twin.inner  # torch.autograd.grad does not see through reentrant checkpoints

    def window_mean(model, window):
        return sum(setting.loss_of(model, micro_batch(*place)) for place in window) / len(window)

    expected, _ = train(twin, cut(lengths, 3), window_mean)
    assert_equal_updates(optimizer.seen, expected, 1e-11)


@pytest.mark.parametrize("lengths", [[7, 7], [5, 8], [8, 2]])
@pytest.mark.parametrize(
    "make",
    [
        static, static_unused, reentrant, not_reentrant, static_reentrant, sparse, ddp_of_compiled, compiled_ddp, inside,
        partly_inside, several, bypassed, two_forwards, cast_once_wrapped, cast_and_back_once_wrapped,
        with_other_storage_once_wrapped, marked_for_ddp_to_ignore,
    ],
)  # fmt: skip
def test_on_ddp(ranks, make, lengths):
    ranks(2).run(exact, make, "ddp", lengths)


@pytest.mark.parametrize("lengths", [[7, 7], [5, 8], [8, 2]])
@pytest.mark.parametrize("make", [reentrant, not_reentrant, sparse, compiled_bare, method, sub_module, two_forwards, marked_for_ddp_to_ignore])
def test_bare(ranks, make, lengths):
    """However the body reaches the parameters, the boundary synchronises them."""
    ranks(2).run(exact, make, "bare", lengths)
