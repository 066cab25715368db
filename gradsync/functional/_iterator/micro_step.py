"""`MicroStep`: a place in a window, handed out to the body of a loop."""

from __future__ import annotations

import torch

from gradsync._loss import LossSum
from gradsync.functional._iterator.body_watch import BodyWatch
from gradsync.functional._team.backward import RunBackward
from gradsync.functional._window.closing import Closing
from gradsync.functional._window.place import Place, Role


class MicroStep:
    """The place of a micro-batch in its window, and its backward."""

    # Not a frozen dataclass: to make one costs four times as much, and each micro-step has its own.
    __slots__ = ("_is_empty", "_place", "_watch")

    def __init__(self, place: Place, watch: BodyWatch) -> None:
        self._place = place
        self._watch = watch
        self._is_empty = False

    @property
    def index(self) -> int:
        """How many micro-steps came before it in its window."""
        return self._place.index

    @property
    def window(self) -> int:
        """How many windows of the loop closed before it."""
        return self._place.window

    @property
    def size(self) -> int:
        """The planned number of micro-batches in its window; a tail ends sooner."""
        return self._place.size

    @property
    def last(self) -> bool:
        """Whether the window closes with this step."""
        return self._place.last

    @property
    def replay(self) -> bool:
        """Whether its item was handed out before: other ranks have more data, and need this rank to take part.

        Its gradients weigh nothing.
        """
        return self._place.role is not Role.RUNS

    def __repr__(self) -> str:
        names = "index", "window", "size", "last", "replay"
        return f"MicroStep({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def backward(
        self, loss: torch.Tensor, *, count: float | torch.Tensor | None = None, run: RunBackward | None = None
    ) -> None:
        """Scale the loss and run its backward; on the last micro-step, synchronise and normalise the gradients.

        After the last one, each gradient is the mean over all micro-batches of all ranks in the window. With `count`,
        `loss` is a sum over `count` items, and the gradient is that of all sums over all counts. With AMP, pass
        `scaler.scale(loss)`. `run` runs the backward in place of `loss.backward`: `run=accelerator.backward`.
        """
        whole = loss if count is None else LossSum(loss, count)
        self._end(self._watch.begin(self._place).backward(self._place, whole, run=run))

    @property
    def empty(self) -> bool:
        """Whether this step has closed a window with nothing to average: its counts add up to zero.

        There are no gradients then. `optimizer.step()` does nothing; do not call `scaler.step()`.
        """
        return self._is_empty

    def _end(self, closing: Closing | None) -> None:
        """Its backward, for which the turn began, has ended."""
        self._is_empty = closing is not None and closing.factor is None
        self._watch.end_backward(closing)
