"""`fit`: forward and backward of a step of `sync_every`, in as many parts as memory needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from gradsync.functional._fit.in_parts import InParts
from gradsync.functional._iterator.micro_step import MicroStep
from gradsync.parts import Cut

P = ParamSpec("P")
R = TypeVar("R")


def fit(function: Callable[P, R], cut: bool | Cut = True) -> Fitting[P, R]:  # noqa: FBT001, FBT002 - `fit` of accumulating
    """Make a function that runs forward and backward of a step of `sync_every`, in as many parts as memory needs.

    `function` returns a loss or a `LossSum`, like a step function for `accumulating`. Call the result with the step and
    the arguments, in place of `step.backward(function(...))`. It returns what `function` returns, the loss detached. It
    remembers the size that fits, so make it once. `cut` is a function of (args, kwargs, parts), for arguments that are
    not tensors with equally many rows.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> backward = gradsync.functional.fit(lambda batch: model(batch).square().mean())
    >>> for step, batch in gradsync.sync_every(model, 2, torch.ones(4, 3, 1)):
    ...     loss = backward(step, batch)
    ...     if step.last:
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> backward.parts, backward.rows
    (1, 3)
    """
    if not callable(function):
        raise TypeError(f"fit needs a function that returns the loss of its arguments, but it is {function!r}.")
    return Fitting(function, cut)


class Fitting(InParts, Generic[P, R]):
    """Runs a function and the backward of its loss in as many parts as memory needs; made by `fit`."""

    def __init__(self, function: Callable[P, R], cut: bool | Cut = True) -> None:  # noqa: FBT001, FBT002
        super().__init__(cut, getattr(function, "__qualname__", repr(function)))
        self._function = function

    def __call__(self, step: MicroStep, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function on these arguments, and then the backward of `step`."""
        returned, closing = self.run(step._watch.begin(step._place), step._place, self._function, args, kwargs)
        step._end(closing)
        result: R = returned
        return result
