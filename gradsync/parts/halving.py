"""One call, run whole if it fits in memory, and in parts if not.

What a failed backward has added stays: each parameter has got either its whole gradient or nothing. So a piece of work
is some rows, and the parameters that still lack their gradient of these rows. A piece that fails is replaced by two:
each has half of the rows, and the parameters that are left.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gradsync._errors import GradSyncError
from gradsync._loss import LossSum, check_loss, detach, find_loss, tensor_of
from gradsync.parts.arrived import Arrived
from gradsync.parts.before import Before
from gradsync.parts.cut import Arguments, first_rows, shape_of
from gradsync.parts.loss_of_parts import add, put
from gradsync.parts.out_of_memory import free, is_out_of_memory, let_go
from gradsync.parts.quiet import Quiet
from gradsync.parts.refuse import check_graph
from gradsync.parts.remembered_fit import Fit

_SMALLEST = 2.0**-16  # a share of a call: below it, the user's cutting function is assumed to make no progress


class Backward:
    """Interface; the base class runs no backward (a replay).

    One part runs the real backward, which synchronises; the others run quietly, before it, or after it if it failed.
    """

    #: Those that may get gradients.
    parameters: Sequence[torch.Tensor] = ()

    def begin(self, loss: torch.Tensor | LossSum, weight: float) -> tuple[torch.Tensor, torch.Tensor | None]:  # noqa: ARG002
        """The tensor from which the backward of a part runs, and the gradient to begin with (None: 1).

        Called right before gradients change. `weight` is the part's weight in the call.
        """
        return tensor_of(loss), None

    def run(self, tensor: torch.Tensor, seed: torch.Tensor | None, whole: torch.Tensor | LossSum) -> None:
        """The one real backward of a call, held or armed; it does not complete the engines' collectives.

        `whole` is the loss of the whole micro-batch, for the ranks' table: what `find_loss` would return if the call
        had fitted.
        """

    def held(self) -> AbstractContextManager[Any]:
        """A context for forward and backward of parts after the real backward has failed: armed engines stay held."""
        return nullcontext()


class Outcome(NamedTuple):
    """How a call ran: what it returned (of several parts, the last), with the loss of all parts, detached."""

    returned: Any
    parts: int
    rows: int | None  # of the largest part; None if rows are not known


def run_in_parts(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], backward: Backward, fit: Fit
) -> Outcome:
    """Call `function` and run its backward, in as many parts as memory needs.

    An error that is not about memory is raised, and so is one about memory if nothing is left to cut.
    """
    return _Call(function, (args, kwargs), backward, fit).run()


@dataclass
class _Piece:
    """Some rows of a call, and the parameters that lack their gradient of these; the first piece has all of both."""

    arguments: Arguments
    left: Sequence[torch.Tensor]
    rows: int | None = None
    size: float = 1.0  # its number of rows; a share of the call if rows are not known

    def cut(self, parts: int, fit: Fit) -> list[_Piece]:
        """This piece in parts; empty if it cannot be cut."""
        arguments = fit.cut(*self.arguments, parts) if self.size >= _SMALLEST else []
        if len(arguments) < 2:
            return []
        rows: list[Any] = [fit.rows(*some) for some in arguments]
        if None in rows or sum(rows) != self.rows:
            return [_Piece(some, self.left, None, self.size / len(arguments)) for some in arguments]
        return [_Piece(some, self.left, number, number) for some, number in zip(arguments, rows, strict=True)]


class _Call:
    def __init__(self, function: Callable[..., Any], arguments: Arguments, backward: Backward, fit: Fit) -> None:
        self.function, self.arguments, self.backward, self.fit = function, arguments, backward, fit
        self.todo = [_Piece(arguments, backward.parameters)]  # a stack: the next piece is the last
        self.quiet = Quiet()
        self.whole: torch.Tensor | LossSum | None = None  # the loss so far
        self.returned: Any = None  # what the last part returned; `found` is the loss in it
        self.found: torch.Tensor | LossSum | None = None
        self.is_broken = False  # whether the real backward has failed
        self.failed = math.inf  # the smallest size that did not fit
        self.fitted: list[_Piece] = []
        self.shape: Any = None
        self.handled = sys.exc_info()[1]  # the exception that the user is handling

    def run(self) -> Outcome:
        fit = self.fit
        if fit.unchecked:
            fit.check_call(*self.arguments)
        if fit.sizes:
            self._remember(self.todo[0])
        while self.todo:
            self._next(self.todo.pop())
        self.quiet.hand_over(touch=self.is_broken)
        if self.shape is not None:
            largest = max((piece.size for piece in self.fitted if piece.size < self.failed), default=1.0)
            fit.sizes.ran(self.shape, self.size, largest, self.failed, fit.name)
        return self._outcome()

    def _remember(self, whole: _Piece) -> None:
        """Begin with the size that fitted last time."""
        self._measure(whole)
        parts = self.fit.sizes.parts(self.shape, whole.size)
        if parts > 1 and (pieces := whole.cut(parts, self.fit)):
            self.todo = pieces[::-1]

    def _measure(self, whole: _Piece) -> None:
        """Measure the size of the call, which is needed once it is cut."""
        whole.rows, self.shape = self.fit.rows(*self.arguments), shape_of(*self.arguments)
        whole.size = self.size = float(whole.rows or 1)

    def _next(self, piece: _Piece) -> None:
        """Run one piece, or put smaller ones in its place."""
        pieces = piece.cut(2, self.fit) if piece.size >= self.failed else []
        if not pieces:
            try:
                self._try(piece)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                pieces = self._after_failure(piece)
                if not pieces:
                    raise
                let_go(error, self.handled)
            else:
                return
            free()  # only here, because the error keeps tensors alive
        self.todo += pieces[::-1]

    def _after_failure(self, piece: _Piece) -> list[_Piece]:
        """The pieces to run instead of this one."""
        self.fit.check_again()
        if self.shape is None:
            self._measure(piece)
        self.failed = min(self.failed, piece.size)
        return piece.cut(2, self.fit)

    def _try(self, piece: _Piece) -> None:
        """Run forward and backward of one piece: the real backward if it is the last piece and that has not failed."""
        args, kwargs = piece.arguments
        before = Before(self.fit.state, args, kwargs)
        try:
            with self.backward.held() if self.is_broken else nullcontext():
                returned = self.function(*args, **kwargs)
                found = find_loss(returned)
                weight = self._check(piece, found)
                if self.is_broken or self.todo:
                    self._run_quietly(piece, found, weight)
                else:
                    self._run_really(piece, found, weight)
        except Exception as error:
            if is_out_of_memory(error):
                before.put_back()
            raise
        before.keep()
        piece.arguments = ((), {})  # the body may have left activations in them
        self.fitted.append(piece)
        if not self.todo:
            self.returned, self.found = returned, found

    def _run_really(self, piece: _Piece, found: torch.Tensor | LossSum, weight: float) -> None:
        whole = found if self.whole is None else add(self.whole, found, weight)
        tensor, seed = self.backward.begin(found, weight)  # may lack memory: before the real backward is spent
        arrived = Arrived(piece.left)
        try:
            with self.quiet.joined():
                self.backward.run(tensor, seed, whole)
        except Exception as error:
            self.is_broken = True
            if is_out_of_memory(error):
                check_graph(tensor, self.backward.parameters)  # this graph may differ from the first
            self.whole = add(self.whole, found, weight)
            piece.left = self.quiet.end_joined(arrived.missing())
            if piece.left or not is_out_of_memory(error):
                raise
        else:
            self.whole = whole
            self.quiet.end_joined()
        finally:
            arrived.end()

    def _run_quietly(self, piece: _Piece, found: torch.Tensor | LossSum, weight: float) -> None:
        left = piece.left = [parameter for parameter in piece.left if parameter.requires_grad]
        if left:
            self.quiet.backward(*self.backward.begin(found, weight), left)
        if not self.is_broken:
            self.whole = add(self.whole, found, weight)

    def _check(self, piece: _Piece, found: torch.Tensor | LossSum) -> float:
        """The weight of a part; raises if backward cannot run from its loss."""
        loss, is_sum = check_loss(found), isinstance(found, LossSum)
        if self.fit.unchecked and self.backward.parameters:
            check_graph(loss, self.backward.parameters)
            self.fit.unchecked = False
        if self.whole is not None and is_sum != isinstance(self.whole, LossSum):
            raise GradSyncError(
                f"The parts of one micro-batch must return the same kind of loss, but {self.fit.name} returned "
                "a LossSum for some and a plain loss for others. Return a LossSum for all."
            )
        if is_sum or piece.arguments is self.arguments:
            return 1.0
        if piece.rows is None:
            raise GradSyncError(
                f"A part's mean counts by its share of the rows, but the rows of {self.fit.name}'s parts do not add up "
                "to those of the call. Return LossSum(sum, count)."
            )
        return piece.rows / self.size

    def _outcome(self) -> Outcome:
        assert self.found is not None, "some part was the last"
        assert self.whole is not None, "and had a loss"
        if len(self.fitted) == 1 and not self.is_broken:
            return Outcome(detach(self.returned, self.found), 1, first_rows(*self.arguments))
        rows = [piece.rows for piece in self.fitted if piece.rows is not None]
        returned = put(self.returned, self.found, self.whole)
        return Outcome(returned, len(self.fitted), max(rows, default=None))
