"""One call, run whole if it fits in memory, and in parts if not.

What a failed backward has added stays: each parameter has got either its whole gradient or nothing. So a piece of work
is some rows, and the parameters that still lack their gradient of these rows. A piece that fails is replaced by two:
each has half of the rows, and the parameters that are left.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradsync._errors import GradSyncError
from gradsync._loss import LossSum, check_loss, find_loss
from gradsync.parts.arrived import Arrived
from gradsync.parts.cut import first_rows, shape_of
from gradsync.parts.loss import add, plain, put, without_graph
from gradsync.parts.memory import free, is_out_of_memory, let_go
from gradsync.parts.piece import Piece
from gradsync.parts.quiet import Quiet
from gradsync.parts.refuse import check_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from gradsync.parts.fit import Fit


@dataclass(frozen=True)
class Work:
    """What there is to run, and how.

    `weigh(loss, weight)` returns the tensor from which the backward of a part runs, and the gradient with which it
    begins (None: 1); `weight` is the part's weight in the call. `backward(tensor, seed, whole)` runs the one real
    backward of a call from these, held or armed; it does not complete the engines' collectives. `whole` is the loss of
    the whole micro-batch, for the ranks' table: what `find_loss` would return if the call had fitted. The other parts'
    backwards run before the real one, or after it if it failed.
    """

    function: Callable[..., Any]
    weigh: Callable[[torch.Tensor | LossSum, float], tuple[torch.Tensor, torch.Tensor | None]]
    backward: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | LossSum], None]
    parameters: Sequence[torch.Tensor]
    #: Entered around forward and backward of parts once the real backward has begun: keeps armed engines held.
    held: Callable[[], AbstractContextManager[Any]] = nullcontext
    #: Called before gradients change, perhaps several times.
    begin: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Outcome:
    """How a call ran: what it returned (of several parts, the last), with the loss of all parts, detached."""

    returned: Any
    loss: torch.Tensor | LossSum
    parts: int
    rows: int | None  # of the largest part; None if rows are not known


def run_in_parts(work: Work, args: tuple[Any, ...], kwargs: Mapping[str, Any], fit: Fit) -> Outcome:
    """Call `work.function` and run its backward, in as many parts as memory needs.

    An error that is not about memory is raised, and so is one about memory if nothing is left to cut.
    """
    return _Call(work, args, kwargs, fit).run()


class _Call:
    def __init__(self, work: Work, args: tuple[Any, ...], kwargs: Mapping[str, Any], fit: Fit) -> None:
        self.work, self.fit = work, fit
        self.arguments = (args, kwargs)
        self.todo = [Piece(self.arguments)]  # a stack: the next piece is the last
        self.quiet: Quiet | None = None
        self.whole: torch.Tensor | LossSum | None = None  # the loss so far
        self.returned: Any = None  # what the last part returned; `found` is the loss in it
        self.found: torch.Tensor | LossSum | None = None
        self.is_spent = self.is_broken = False  # whether the real backward has begun, and whether it has failed
        self.failed = math.inf  # the smallest size that did not fit
        self.fitted: list[Piece] = []
        self.shape: Any = None
        self.before = sys.exc_info()[1]  # the exception that the user is handling

    def run(self) -> Outcome:
        fit = self.fit
        if fit.unchecked:
            fit.check_call(*self.arguments)
        if fit.sizes:
            self._remember(self.todo[0])
        while self.todo:
            self._next(self.todo.pop())
        if self.quiet is not None:
            self.quiet.hand_over(touch=self.is_broken)
        if self.shape is not None:
            largest = max((piece.size for piece in self.fitted if piece.size < self.failed), default=1.0)
            fit.sizes.ran(self.shape, self.size, largest, self.failed, fit.name)
        return self._outcome()

    def _remember(self, whole: Piece) -> None:
        """Begin with the size that fitted last time."""
        self._measure(whole)
        parts = self.fit.sizes.parts(self.shape, whole.size)
        if parts > 1 and (pieces := whole.cut(parts, self.fit)):
            self.todo = pieces[::-1]

    def _measure(self, whole: Piece) -> None:
        """Measure the size of the call, which is needed once it is cut."""
        args, kwargs = self.arguments
        whole.rows, self.shape = self.fit.rows(args, kwargs), shape_of(args, kwargs)
        whole.size = self.size = float(whole.rows or 1)

    def _next(self, piece: Piece) -> None:
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
                let_go(error, self.before)
            else:
                return
            free()  # only here, because the error keeps tensors alive
        self.todo += pieces[::-1]

    def _after_failure(self, piece: Piece) -> list[Piece]:
        """The pieces to run instead of this one."""
        self.fit.check_again()
        if self.shape is None:
            self._measure(piece)
        self.failed = min(self.failed, piece.size)
        return piece.cut(2, self.fit)

    def _try(self, piece: Piece) -> None:
        """Run forward and backward of one piece: the real backward if it is the last piece and that has not begun."""
        args, kwargs = piece.arguments
        before = self.fit.before(args, kwargs)
        try:
            if self.is_spent:
                with self.work.held():
                    self._run_quietly(piece, self.work.function(*args, **kwargs))
            elif self.todo:
                self._run_quietly(piece, self.work.function(*args, **kwargs))
            else:
                self._run_really(piece, self.work.function(*args, **kwargs))
        except Exception as error:
            if is_out_of_memory(error):
                before.put_back()
            raise
        before.keep()
        piece.arguments = ((), {})  # the body may have left activations in them
        self.fitted.append(piece)

    def _run_really(self, piece: Piece, returned: Any) -> None:
        work, found = self.work, find_loss(returned)
        weight = self._check(piece, found)
        whole = found if not self.fitted else add(self.whole, found, weight)
        left = work.parameters if piece.left is None else piece.left
        tensor, seed = work.weigh(found, weight)  # before the real backward begins: this needs memory, too
        work.begin()
        arrived = Arrived(left)
        self.is_spent = True
        joining: AbstractContextManager[set[int]] = nullcontext(set()) if self.quiet is None else self.quiet.joined()
        joined: set[int] = set()
        try:
            with joining as joined:
                work.backward(tensor, seed, whole)
        except Exception as error:
            self.is_broken = True
            if is_out_of_memory(error):
                check_graph(tensor, work.parameters)  # this graph may differ from the first
            self.whole = plain(whole)
            missing = arrived.missing()
            if self.quiet is not None:
                self.quiet.keep_waiting(missing, joined)
            piece.left = [parameter for parameter in missing if id(parameter) not in joined]
            if piece.left or not is_out_of_memory(error):
                raise
        else:
            if self.quiet is not None:
                self.quiet.keep_waiting((), joined)
            self.whole = whole
        finally:
            arrived.end()
        self.returned, self.found = returned, found

    def _run_quietly(self, piece: Piece, returned: Any) -> None:
        found = find_loss(returned)
        weight = self._check(piece, found)
        if piece.left is None:
            piece.left = [parameter for parameter in self.work.parameters if parameter.requires_grad]
        if self.quiet is None:
            self.quiet = Quiet()
        self.work.begin()
        if piece.left:
            self.quiet.backward(*self.work.weigh(found, weight), piece.left)
        if not self.is_spent:
            self.whole = add(self.whole, found, weight)
        if not self.todo:
            self.returned, self.found = returned, found

    def _check(self, piece: Piece, found: torch.Tensor | LossSum) -> float:
        """The weight of a part; raises if backward cannot run from its loss."""
        is_sum = isinstance(found, LossSum)
        loss = found.loss if isinstance(found, LossSum) else found
        check_loss(loss)
        if self.fit.unchecked and self.work.parameters:
            check_graph(loss, self.work.parameters)
            self.fit.unchecked = False
        if self.whole is not None and is_sum != isinstance(self.whole, LossSum):
            raise GradSyncError(
                f"The parts of one micro-batch must return the same kind of loss, but {self.fit.name} returned "
                "a LossSum for some and a plain loss for others. Return a LossSum for all."
            )
        if is_sum or piece.share == 1.0:
            return 1.0
        if piece.share is None:
            raise GradSyncError(
                f"A mean over a part weighs what its share of the rows is, but the parts that {self.fit.name} was cut "
                "into do not have rows that add up to those of the call. Return LossSum(sum, count)."
            )
        return piece.share

    def _outcome(self) -> Outcome:
        assert self.found is not None, "some part was the last"
        assert self.whole is not None, "and had a loss"
        if len(self.fitted) == 1 and not self.is_broken:
            returned, loss = without_graph(self.returned, self.found)
            return Outcome(returned, loss, 1, first_rows(*self.arguments))
        whole = plain(self.whole)
        rows = [piece.rows for piece in self.fitted if piece.rows is not None]
        return Outcome(put(self.returned, self.found, whole), whole, len(self.fitted), max(rows, default=None))
