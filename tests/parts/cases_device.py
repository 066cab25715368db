"""`fit` on a device, which runs its part of a backward in a thread of its own; run by tests/device/test_device.py."""

import threading
import time

import torch

import gradsync
from tests.device.waits import waits


class Fails(torch.autograd.Function):
    """On the host: out of memory for more than one row, when the device's thread has come to a parameter."""

    @staticmethod
    def forward(ctx, x, came):
        ctx.came = came
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) > 1:
            assert ctx.came.wait(30)
            raise torch.OutOfMemoryError("not really")
        return gradient, None


class Both(torch.nn.Module):
    """A parameter on the host, and one on the device."""

    def __init__(self, device="cuda"):
        super().__init__()
        self.here = torch.nn.Parameter(torch.ones(3))
        self.there = torch.nn.Parameter(torch.ones(3, device=device))

    def forward(self, x, came):
        here = Fails.apply((x * self.here).sum(1).exp(), came)
        there = (x.to(self.there.device) * self.there).sum(1).exp()  # later, and so earlier in the backward
        return here.mean() + there.mean().cpu()


def a_thread_that_is_at_a_gradient():
    """The gradients, those of a process with the memory, and how often a hook at the slow parameter ran."""
    came, seen = threading.Event(), []
    model = Both()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def slow(gradient):
        came.set()
        seen.append(gradient)
        time.sleep(0.3)  # while the host's thread fails

    model.there.register_hook(slow)

    @gradsync.accumulating(1, fit=True)
    def step(model, optimizer, x):
        return model(x, came)

    x = torch.arange(12.0).view(4, 3) / 12
    step(model, optimizer, x)
    twin = Both("cpu")
    ((x * twin.here).sum(1).exp().mean() + (x * twin.there).sum(1).exp().mean()).backward()
    made = [1 - parameter.detach().cpu() for parameter in model.parameters()]
    return made, [parameter.grad for parameter in twin.parameters()], len(seen), step.progress.parts


def waits_of_a_call_that_fits():
    """How often the host waits for the device, in calls with `fit` after the first."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)).to("cuda")
    model.register_buffer("calls", torch.zeros((), device="cuda"))

    def count(model, _):
        model.calls += 1

    model.register_forward_pre_hook(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @gradsync.accumulating(2, fit=True)
    def step(model, optimizer, x):
        return model(x).square().mean()

    x = torch.ones(4, 3, device="cuda")
    step(model, optimizer, x)
    with waits() as found:
        for _ in range(3):
            step(model, optimizer, x)
    return dict(found)
