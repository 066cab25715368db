"""DDP around and behind models of every kind, against float64: checkpointed, compiled, sparse, static, in parts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import Checkpointed, Sparse, WithBuffers, small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean


def scenario(name: str, kind: str = "ddp", lengths=(7, 7), steps: int = 3) -> None:
    """A model in some configuration against the float64 reference, tails included."""
    rank = dist.get_rank()
    reference = window_mean
    torch.manual_seed(7)
    loss_of = mean_loss
    if name == "static":
        model = small_model()
        home = DDP(model, static_graph=True)
    elif name == "static unused":
        model = small_model(unused=True)
        home = DDP(model, static_graph=True)
    elif name in {"reentrant", "not reentrant"}:
        model = Checkpointed(name == "reentrant")
        home = DDP(model) if kind == "ddp" else model
    elif name == "static reentrant":
        model = Checkpointed(True)
        home = DDP(model, static_graph=True)
    elif name == "sparse":
        model = Sparse()
        home = DDP(model) if kind == "ddp" else model
    elif name in {"ddp of compiled", "compiled ddp"}:
        model = small_model()
        home = DDP(torch.compile(model, backend="aot_eager")) if name == "ddp of compiled" else torch.compile(
            DDP(model), backend="aot_eager")
    elif name == "compiled bare":
        model = small_model()
        home = torch.compile(model, backend="aot_eager")
    elif name == "inside":
        model = small_model()
        home = nn.Sequential(DDP(model))
    elif name == "partly inside":  # DDP around one layer, the rest bare
        model = small_model()
        home = nn.Sequential(DDP(model[0]), model[1], model[2])
    elif name == "several":
        model = small_model()
        home = nn.Sequential(DDP(model[0]), model[1], DDP(model[2]))
    elif name == "method":
        model = WithBuffers().eval()
        home = model
        loss_of = lambda m, x: m.loss(x)  # noqa: E731
    elif name == "bypassed":
        model = small_model()
        home = DDP(model)
        loss_of = lambda m, x: mean_loss(m.module, x)  # noqa: E731
    elif name == "sub-module":
        model = WithBuffers().eval()
        home = model
        loss_of = lambda m, x: mean_loss(m.inner, m.norm(x))  # noqa: E731
    elif name == "two forwards":
        model = small_model()
        home = DDP(model) if kind == "ddp" else model
        loss_of = lambda m, x: (mean_loss(m, x[:2]) + mean_loss(m, x[2:])) / 2  # noqa: E731
        reference = lambda m, w: sum(loss_of(m, micro_batch(r, i)) for r, i in w) / len(w)  # noqa: E731
    else:
        raise ValueError(name)
    twin = copy.deepcopy(model)
    optimizer = Recorder(model.parameters())
    data = [micro_batch(rank, i) for i in range(lengths[rank])]
    step = accumulating(steps=steps)(lambda model, optimizer, x: loss_of(model, x))
    for x in step.over(data):
        step(home, optimizer, x)
    if name in {"method", "sub-module"}:
        reference = lambda m, w: sum(mean_loss(m, micro_batch(r, i)) for r, i in w) / len(w)  # noqa: E731
    if isinstance(twin, Checkpointed):
        twin = twin.inner  # torch.autograd.grad does not see through reentrant checkpoints
    expected, _ = train(twin, cut(list(lengths), steps), reference)
    assert_equal_updates(optimizer.seen, expected, 1e-11)


@pytest.mark.parametrize("lengths", [[7, 7], [5, 8], [8, 2]])
@pytest.mark.parametrize(
    "name",
    [
        "static", "static unused", "reentrant", "not reentrant", "static reentrant", "sparse", "ddp of compiled",
        "compiled ddp", "inside", "partly inside", "several", "bypassed", "two forwards",
    ],
)  # fmt: skip
def test_ddp_scenarios(ranks, name, lengths):
    ranks(2).run(scenario, name, "ddp", lengths)


@pytest.mark.parametrize("lengths", [[7, 7], [5, 8], [8, 2]])
@pytest.mark.parametrize(
    "name", ["reentrant", "not reentrant", "sparse", "compiled bare", "method", "sub-module", "two forwards"]
)
def test_bare_scenarios(ranks, name, lengths):
    """However the body reaches the parameters, the boundary synchronises them."""
    ranks(2).run(scenario, name, "bare", lengths)
