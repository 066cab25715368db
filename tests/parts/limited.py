"""Memory that is too small, without using any: an operation that fails for more rows than a limit."""

import torch

from gradsync._loss import LossSum
from gradsync.parts import Backward, Fit, run_in_parts


class Limit(torch.autograd.Function):
    """Hands its input through, and runs out of memory in its forward or backward where that has too many rows."""

    @staticmethod
    def forward(ctx, x, limit, where, log):
        ctx.limit, ctx.where, ctx.log = limit, where, log
        if where == "forward" and len(x) > limit:
            log.append(len(x))
            raise torch.OutOfMemoryError("CUDA out of memory. (not really)")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.where == "backward" and len(gradient) > ctx.limit:
            ctx.log.append(len(gradient))
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte.")
        return gradient, None, None, None


class Net(torch.nn.Module):
    """Layers, the first of them used twice, with a limit somewhere between them."""

    def __init__(self, depth=4, at=2, width=5, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, dtype=dtype) for _ in range(depth))
        self.at, self.limit, self.where, self.log = at, 10**9, "forward", []
        self.dropout = 0.0

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index == self.at:
                x = Limit.apply(x, self.limit, self.where, self.log)
            x = torch.tanh(layer(x))
            if self.dropout:
                x = torch.nn.functional.dropout(x, self.dropout)
        return self.layers[0](x)


def mean_loss(model, x, y):
    return ((model(x) - y) ** 2).mean(dim=1).mean()


def sum_loss(model, x, y):
    return LossSum(((model(x) - y) ** 2).sum(), y.numel())


def batch(rows, width=5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, width, generator=generator, dtype=dtype) for _ in range(2))


class BackwardOf(Backward):
    """What a decorator would bring: the engines are held outside; the last backward arms them."""

    def __init__(self, model, scale=1.0, engines=(), last=False, calls=None):
        self.parameters = list(model.parameters())
        self.scale, self.engines, self.last, self.calls = scale, engines, last, calls

    def begin(self, found, weight):
        loss = found.loss if isinstance(found, LossSum) else found
        return loss * self.scale, torch.full_like(loss, weight)

    def run(self, loss, seed, whole):
        if self.calls is not None:
            self.calls.append((seed.item(), whole))
        if self.last:
            for engine in self.engines:
                engine.arm(loss * 1.0)
        loss.backward(seed)

    def held(self):
        return Held(self.engines, around=True)


class Held:
    """Engines held; `around`: an armed DDP whose backward has failed refuses its own forward, so go around that."""

    def __init__(self, engines, around=False):
        self.engines, self.around = engines, around

    def __enter__(self):
        self.found = [engine.hold() for engine in self.engines]
        self.wrappers = [engine._ddp for engine in self.engines if self.around and "module" in engine._ddp._modules]
        self.forwards = [vars(ddp).get("forward") for ddp in self.wrappers]
        for ddp in self.wrappers:
            vars(ddp)["forward"] = ddp.module.__call__

    def __exit__(self, *_):
        for ddp, forward in zip(self.wrappers, self.forwards):
            vars(ddp).pop("forward")
            if forward is not None:
                vars(ddp)["forward"] = forward
        for engine, found in zip(self.engines, self.found):
            engine.restore(found)


def opened(model, cut=True):
    fit = Fit(cut, name="train_step")
    fit.open([model])
    return fit


def run(model, *data, function=mean_loss, fit=None, **others):
    return run_in_parts(function, (model, *data), {}, BackwardOf(model, **others), fit or opened(model))


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(some, others, tolerance=1e-12):
    assert len(some) == len(others)
    for one, other in zip(some, others):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
