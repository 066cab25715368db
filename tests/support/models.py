"""The models of the tests, all small: what is odd about each, its docstring says."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradsync.verify.models import Block, Net, net, second_block  # noqa: F401
from tests.support.reference import mean_loss
from tests.support.traps import Trap


def small_model(dtype=torch.float64, unused: bool = False) -> nn.Module:
    """Three numbers in, two out; `unused` adds a parameter that nobody uses."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    if unused:
        model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=dtype)))
    return model


class WithBuffers(nn.Module):
    """Has buffers, which differ between ranks, and a method beside forward."""

    def __init__(self):
        super().__init__()
        self.inner = small_model()
        self.norm = nn.BatchNorm1d(3).double()

    def forward(self, x):
        return self.inner(self.norm(x))

    def loss(self, x):
        return mean_loss(self, x)


class Checkpointed(nn.Module):
    """Runs its layers again in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = small_model()
        self.reentrant = reentrant

    def forward(self, x):
        y = self.inner[1](checkpoint(self.inner[0], x.requires_grad_(), use_reentrant=self.reentrant))
        return checkpoint(self.inner[2], y, use_reentrant=self.reentrant)


class Sparse(nn.Module):
    """Has a sparse gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(10, 3, sparse=True).double()
        self.head = nn.Linear(3, 2).double()

    def forward(self, x):
        return self.head(self.embedding(x.abs().sum(1).long() % 10))


class Partly(nn.Module):
    """Two layers; the second runs only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.both = False

    def forward(self, x):
        x = self.one(x)
        return self.two(x) if self.both else x


class OnlyIf(nn.Module):
    """Uses its parameter if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, y, use):
        return y * self.weight if use else y


class Choosy(nn.Module):
    """Parameters that some ranks use in some micro-batches, that give a gradient of zeros, and that nobody uses."""

    NAMES = ("last_rank_zeros", "nobody", "always", "never_trained")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            setattr(self, name, nn.Parameter(torch.ones(5, dtype=torch.float64), requires_grad=name != "never_trained"))
        self.first_rank_first_time = OnlyIf()

    def forward(self, x, rank, index):
        y = x.sum() * self.always * self.never_trained
        y = self.first_rank_first_time(y, rank == 0 and index == 0)
        if rank == 3 and index == 0:
            y = y + self.last_rank_zeros * 0
        return y


class Odd(nn.Module):
    """Sizes that nothing divides, a parameter of one element, one that is shared, and one that is frozen."""

    def __init__(self, frozen: bool = False, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one, self.two, self.three = nn.Linear(4, 7), nn.Linear(7, 4), nn.Linear(4, 4)
        self.single = nn.Linear(4, 1)
        self.tied = nn.Linear(4, 7, bias=False)
        if tied:
            self.tied.weight = self.one.weight
        self.two.weight.requires_grad_(not frozen)

    def forward(self, x):
        y = self.three(self.two(torch.tanh(self.one(x))))
        return self.single(y) + self.tied(y).sum()


class Square(nn.Module):
    """Three numbers in, three out; perhaps a parameter that nobody uses, and a buffer that counts what came."""

    def __init__(self, seed: int, unused: bool, buffers: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()
        if unused:
            self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        if buffers:
            self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, x, trap=None):
        if hasattr(self, "seen"):
            self.seen += x.detach().abs().sum()
        h = torch.tanh(self.first(x))
        return self.last(h if trap is None else Trap.apply(h, trap))
