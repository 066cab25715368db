"""A layer that comes after the first forward (a new head) is a root of its own for FSDP2: what ends a backward runs for both."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradsync
from tests.support.compare import assert_equal_state
from tests.support.reference import mean_of, micro_batch, train

STEPS, LR = 2, 0.1


class Failing(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        raise ArithmeticError


class Net(nn.Module):
    """Two layers, of which a forward may leave out the second; its backward may fail between them."""

    def __init__(self):
        super().__init__()
        self.body, self.head = layer(1), layer(2)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x, *, short: bool = False, fails: bool = False):
        x = torch.tanh(self.body(x)) * self.scale
        return mean_of(x if short else self.head(Failing.apply(x) if fails else x))


def layer(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 3).double()


def sharded() -> Net:
    model = Net()
    for module in (model.body, model.head, model):
        fully_shard(module)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


# The ways to end a window of the items 2 and 3, with the items of which it makes an update. In "short", the second of them
# leaves out the new head.
ENDS = {"full": [2, 3], "short": [2, 3], "flush": [2], "sync_gradients": [2], "discarded": [], "failed": [], "checkpoint": [2, 3]}


def trained(end: str, has_run: bool) -> dict:
    """A window; then a new head, and a window that ends in this way; then one more."""
    rank, model = dist.get_rank(), sharded()
    optimizer = sgd(model)

    @gradsync.accumulating(STEPS)
    def step(model, optimizer, index, **how):
        return model(micro_batch(rank, index), **how)

    for index in (0, 1):
        step(model, optimizer, index)
    model.head = fully_shard(layer(3))
    if has_run:
        with torch.no_grad():
            model(micro_batch(rank, 0))
        for module in (model.head, model.body, model):
            module.reshard()
    optimizer = sgd(model)
    if end == "sync_gradients":
        with gradsync.no_sync(model):
            model(micro_batch(rank, 2)).backward()
        gradsync.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    else:
        step(model, optimizer, 2)
    if end in {"full", "checkpoint"}:
        if end == "checkpoint":
            step.load_state_dict(step.state_dict())
        step(model, optimizer, 3)
    elif end == "short":
        step(model, optimizer, 3, short=True)
    elif end == "flush":
        step.flush()
    elif end == "discarded":
        step.reset()
    elif end == "failed":
        with pytest.raises(ArithmeticError):
            step(model, optimizer, 3, fails=True)
    for index in (4, 5):
        step(model, optimizer, index)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_window_behind_a_new_head(ranks, end, has_run):
    """Its gradients stayed each rank's own after a failed backward; a flush left them out, and the next call was an error."""
    _, model = train(Net(), [[(r, i) for r in (0, 1) for i in (0, 1)]], whole, lr=LR)
    model.head = layer(3)
    windows = [[(r, i) for r in (0, 1) for i in items] for items in (ENDS[end], [4, 5]) if items]
    loss = (lambda m, w: whole(m, w, short=w[-1][1])) if end == "short" else whole
    _, model = train(model, windows[:-1], loss, lr=LR)
    _, model = train(model, windows[-1:], whole, lr=LR)
    for came in ranks(2).run(trained, end, has_run, limit=20):
        assert_equal_state(came, model.state_dict(), 1e-12)


def whole(model, window, short: int = -1):
    return torch.stack([model(micro_batch(r, i), short=i == short) for r, i in window]).mean()
