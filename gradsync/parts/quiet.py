"""Gradients of one part, added where they belong without running the hooks that see a whole micro-batch's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


class Quiet:
    """What the parts of one micro-batch have added so far.

    A part's gradient goes straight into `grad`. Where the user has hooks at a parameter, it waits beside that instead,
    and the hooks see the sum of all parts, once: with the last part's backward (`joined`), or after it (`hand_over`).
    """

    def __init__(self) -> None:
        self._waiting: dict[torch.Tensor, torch.Tensor] = {}
        self._reached: dict[torch.Tensor, None] = {}

    def backward(self, loss: torch.Tensor, seed: torch.Tensor | None, parameters: list[torch.Tensor]) -> None:
        """Add the gradients of `loss * seed`. Those that have got theirs leave the list, also if it fails."""
        done: set[int] = set()
        inputs = list(parameters)
        try:
            with _hooked(inputs, lambda parameter: self._take(parameter, done), alone=True):
                torch.autograd.grad(loss, inputs, seed, allow_unused=True)
        except BaseException:
            parameters[:] = [parameter for parameter in inputs if id(parameter) not in done]
            raise
        parameters.clear()

    @contextmanager
    def joined(self) -> Iterator[set[int]]:
        """In a backward inside, what waits for a parameter arrives with its gradient; the ids of those joined."""
        given: set[int] = set()
        with _hooked(list(self._waiting), lambda parameter: self._give(parameter, given), alone=False):
            yield given

    def keep_waiting(self, missing: Sequence[torch.Tensor], joined: set[int]) -> None:
        """The real backward has ended: what it has joined has arrived, except for those that it is `missing`."""
        gone = joined - set(map(id, missing))
        self._waiting = {parameter: total for parameter, total in self._waiting.items() if id(parameter) not in gone}

    def hand_over(self, *, touch: bool) -> None:
        """What still waits arrives, through its hooks.

        `touch` runs the engines' hooks at the others too, which have their gradients already: a backward that would
        have run them has failed. An undefined gradient adds nothing.
        """
        late = list(self._reached | dict.fromkeys(self._waiting)) if touch else list(self._waiting)
        if late:
            with torch.enable_grad():
                _HandOver.apply(self._waiting, *late).backward()  # type: ignore[no-untyped-call]
        self._waiting, self._reached = {}, {}

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
            # What is returned is kept to the end of the backward: something without memory.
            return None if gradient.is_sparse else gradient.new_zeros(()).expand_as(gradient)

        return take

    def _give(self, parameter: torch.Tensor, given: set[int]) -> Callable[[Any], Any]:
        def give(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:
                return None
            with torch.no_grad():
                total = self._waiting[parameter] = _sum(self._waiting[parameter], gradient, parameter)
            given.add(id(parameter))
            return total

        return give


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
    """A hook at each parameter, the first there; `alone` puts the others aside meanwhile."""
    handles, others = [], []
    try:
        for parameter in parameters:
            # Torch runs them in the order in which they came into the dictionary: take out what is to come later.
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
    """`total` with `gradient` added in place, or a copy of it; it may be another parameter's gradient as well."""
    if total is None:
        if gradient.is_sparse:
            return gradient.clone()
        return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)  # strides are the parameter's
    if total.is_sparse and not gradient.is_sparse:
        return gradient + total
    return total.add_(gradient)
