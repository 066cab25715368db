"""`fully_shard` on parameters that bring an all-gather of their own, as those do that travel in float8."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils import _pytree as pytree

import gradsync
from gradsync import accumulating
from tests.support.compare import assert_equal_updates
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean
from tests.support.verdicts import FullRecorder

aten = torch.ops.aten


class OwnGather(torch.Tensor):
    """A tensor around another; it travels as that."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def fsdp_pre_all_gather(self, _):
        return (self.inner,), None

    def fsdp_post_all_gather(self, outputs, *_, out=None):
        return None if out is not None else (outputs[0], outputs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        plain = pytree.tree_map_only(OwnGather, lambda one: one.inner, (args, kwargs or {}))
        out = function(*plain[0], **plain[1])
        if function is aten.copy_.default or function.name().split(".")[0].endswith("_"):
            return args[0]
        return pytree.tree_map_only(torch.Tensor, OwnGather, out)


def even_model() -> nn.Module:
    """Two ranks have equal pieces of each weight: others would have to be padded."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def by_calls(steps: int, model, optimizer, loss_of, items) -> None:
    step = accumulating(steps)(lambda model, optimizer, i: loss_of(i))
    for i in step.over(items):
        step(model, optimizer, i)


def by_sync_every(steps: int, model, optimizer, backward, items) -> None:
    for micro, i in gradsync.sync_every(model, steps, items):
        backward(micro, i)
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()


def by_step_backward(steps: int, model, optimizer, loss_of, items) -> None:
    by_sync_every(steps, model, optimizer, lambda micro, i: micro.backward(loss_of(i)), items)


def by_plain_backward(steps: int, model, optimizer, loss_of, items) -> None:
    by_sync_every(steps, model, optimizer, lambda micro, i: (loss_of(i) / micro.size).backward(), items)


def trained(loop, steps: int, lengths: list[int]) -> None:
    rank, model = dist.get_rank(), even_model()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(OwnGather(layer.weight.detach()))
        fully_shard(layer)
    fully_shard(model)
    optimizer = FullRecorder(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["foreach"] = False
    loop(steps, model, optimizer, lambda i: mean_loss(model, micro_batch(rank, i)), range(lengths[rank]))
    assert_equal_updates(optimizer.seen, train(even_model(), cut(lengths, steps), window_mean)[0])


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("loop", "lengths"),
    [(by_calls, [4, 2]), (by_step_backward, [4, 4]), (by_step_backward, [4, 2]), (by_plain_backward, [4, 4])],
)
def test_a_parameter_with_an_all_gather_of_its_own(ranks, loop, steps, lengths):
    """torch makes what autograd sees of it in its first all-gather, and not before."""
    ranks(2).run(trained, loop, steps, lengths)
