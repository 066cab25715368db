"""The model that is trained on every engine, with errors that can be switched on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class Trap(torch.autograd.Function):
    """The identity; its backward raises `error`, unless that is None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException | None) -> torch.Tensor:
        """A copy."""
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient, or the error."""
        if ctx.error is not None:
            raise ctx.error
        return gradient, None


class Poison(torch.autograd.Function):
    """Zero, with a gradient of inf."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Zeros."""
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        """Infinity."""
        return torch.full_like(gradient, float("inf"))


def _applied(function: Any, *args: Any) -> torch.Tensor:
    return cast("torch.Tensor", function.apply(*args))


class Block(nn.Module):
    """Two layers and a residual; `fails` says where it raises: "" (nowhere), "forward" or "backward".

    With `is_left_out`, its parameters are not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fails = ""
        self.is_left_out = False
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, poison: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002 - FSDP wraps it
        """With `poison`, the gradient of one element is inf."""
        if self.is_left_out:
            return x * 1.0
        if self.fails == "backward":
            x = _applied(Trap, x, ArithmeticError("in backward"))
        if self.fails == "forward":
            raise ArithmeticError("in forward")
        x = x + self.down(torch.tanh(self.up(x)))
        if poison:  # one element of one parameter: on a sharded engine, one rank's
            weight: Any = self.up.weight
            weight = weight.to_local() if hasattr(weight, "to_local") else weight
            x = x + _applied(Poison, weight[0, 0])
        return x


class Net(nn.Module):
    """Two blocks, a parameter of the root's own, and with `unused` a parameter that nothing uses."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.scale = nn.Parameter(torch.ones(4))
        if unused:
            self.second.register_parameter("unused", nn.Parameter(torch.ones(4)))

    def forward(self, x: torch.Tensor, poison: bool = False, only_first: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002
        """With `only_first`, the second block is left out."""
        x = self.first(x, poison)
        if not only_first:
            x = self.second(x)
        return x * self.scale

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """A method beside forward."""
        return cast("torch.Tensor", self(x))


def second_block(model: nn.Module) -> Block:
    """That of a `Net`, however it is wrapped."""
    second: Block = [module for module in model.modules() if isinstance(module, Block)][1]
    return second


def net(dtype: torch.dtype = torch.float64, *, unused: bool = False) -> Net:
    """A model with the same weights each time."""
    torch.manual_seed(7)
    with torch.device("cpu"):
        return Net(unused=unused).to(dtype)
