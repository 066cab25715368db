"""Adds the gradients of one part without running users' hooks, which must see those of a whole micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


class Quiet:
    """What the parts of one micro-batch have added so far.

    A part's gradient is added to `grad`. If the user has hooks at a parameter, the gradient waits in a table instead:
    the hooks then see the sum of all parts once, in the last part's backward (`joined`) or after it (`hand_over`).
    """

    def __init__(self) -> None:
        self._waiting: dict[torch.Tensor, torch.Tensor] = {}
        self._reached: dict[torch.Tensor, None] = {}
        self._joined: set[int] = set()

    def backward(self, loss: torch.Tensor, seed: torch.Tensor | None, parameters: list[torch.Tensor]) -> None:
        """Add the gradients of `loss * seed`; `parameters` loses those that have got theirs, even if this fails."""
        done: set[int] = set()
        inputs = list(parameters)
        try:
            with _hooked(inputs, lambda parameter: self._take(parameter, done), alone=True):
                torch.autograd.grad(loss, inputs, seed, allow_unused=True)
        except BaseException:
            parameters[:] = [parameter for parameter in inputs if id(parameter) not in done]
            raise
        parameters.clear()

    def joined(self) -> AbstractContextManager[None]:
        """The real backward runs inside, once: what waits for a parameter joins the gradient that comes to it."""
        return _hooked(list(self._waiting), self._join, alone=False)

    def end_joined(self, missing: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """That backward has ended: drop what arrived.

        Returns the `missing` parameters for which we hold no gradient, so they must be computed again.
        """
        gone = self._joined - set(map(id, missing))
        self._waiting = {parameter: total for parameter, total in self._waiting.items() if id(parameter) not in gone}
        return [parameter for parameter in missing if id(parameter) not in self._joined]

    def hand_over(self, *, touch: bool) -> None:
        """Add what still waits, through the hooks.

        With `touch`, the engines' hooks run at the other parameters, too. These have their gradients already, but the
        backward that would have run the hooks has failed. They get an undefined gradient, which adds nothing.
        """
        late = list(self._reached | dict.fromkeys(self._waiting)) if touch else list(self._waiting)
        if late:
            with torch.enable_grad():
                _HandOver.apply(self._waiting, *late).backward()  # type: ignore[no-untyped-call]

    def _take(self, parameter: torch.Tensor, done: set[int]) -> Callable[[Any], Any]:
        waits = _is_hooked(parameter)

        def take(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:
                return None
            with torch.no_grad():
                if waits:
                    self._waiting[parameter] = _sum(self._waiting.get(parameter), gradient, parameter)
                else:
                    parameter.grad = _sum(parameter.grad, gradient, parameter)
            self._reached[parameter] = None
            done.add(id(parameter))
            # Autograd keeps what is returned until the backward ends: return a tensor that takes no memory.
            return None if gradient.is_sparse else gradient.new_zeros(()).expand_as(gradient)

        return take

    def _join(self, parameter: torch.Tensor) -> Callable[[Any], Any]:
        def join(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:
                return None
            with torch.no_grad():
                total = self._waiting[parameter] = _sum(self._waiting[parameter], gradient, parameter)
            self._joined.add(id(parameter))
            return total

        return join


def _is_hooked(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class _HandOver(torch.autograd.Function):
    """Gives each parameter what waits for it, and the others an undefined gradient."""

    @staticmethod
    def forward(ctx: Any, waiting: Mapping[torch.Tensor, torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = [waiting.get(parameter) for parameter in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.gradients)


@contextmanager
def _hooked(
    parameters: Sequence[torch.Tensor], make: Callable[[torch.Tensor], Callable[[Any], Any]], *, alone: bool
) -> Iterator[None]:
    """Inside, a hook at each parameter runs before the others there; with `alone`, it runs instead of them."""
    handles, others = [], []
    try:
        for parameter in parameters:
            # torch runs hooks in the order of the dictionary: take out those that must come later.
            hook, hooks = make(parameter), parameter._backward_hooks
            found = dict(hooks or ())
            if hooks is not None and found:
                others.append((hooks, found))
                hooks.clear()
            handles.append(parameter.register_hook(hook))
            if hooks is not None and not alone:
                hooks.update(found)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for hooks, found in others:
            hooks.update(found)


def _sum(total: torch.Tensor | None, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`total` with `gradient` added in place, or a copy of `gradient`, which may be another parameter's, too."""
    if total is None:
        if gradient.is_sparse:
            return gradient.clone()
        return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)  # strides are the parameter's
    if total.is_sparse and not gradient.is_sparse:
        return gradient + total
    return total.add_(gradient)
