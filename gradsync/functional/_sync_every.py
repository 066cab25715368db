"""`sync_every`: the windows of a loop that stays the user's own."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, overload

from gradsync._errors import GradSyncError
from gradsync.engines import attach, rest
from gradsync.functional._agreement import agree_on_kind, agree_on_model, insist, meet, meet_with_data, ranks_where
from gradsync.functional._gradients import discard, normalise
from gradsync.functional._leaf_hooks import LeafHooks, PlainBackward, weightless
from gradsync.functional._loss import SUM, LossSum, kind_of
from gradsync.functional._lost import WaitingFor, is_lost, lost, waited
from gradsync.functional._micro_batch import named_range
from gradsync.functional._no_sync import check_modules
from gradsync.functional._notice import Notice, opening
from gradsync.functional._open_window import OpenWindow
from gradsync.functional._stream import length, lookahead
from gradsync.functional._window import Steps, check_steps, window_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch
    from torch import nn

    from gradsync.functional._tally import Row

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class MicroStep:
    """One micro-batch's place in its window, and its backward."""

    index: int
    window: int
    size: int
    last: bool
    replay: bool
    _loop: _Loop = field(repr=False)

    def backward(self, loss: torch.Tensor, *, count: float | torch.Tensor | None = None) -> None:
        """Scale the loss and run its backward; on the last micro-step, synchronise and normalise the gradients.

        Afterwards, on the last one, each gradient is the mean over all micro-batches of all ranks in the window. With
        `count`, `loss` is a sum over `count` items, and the gradient is that of all sums over all counts. With AMP,
        pass `scaler.scale(loss)`.
        """
        self._loop.backward(self, loss if count is None else LossSum(loss, count))


@overload
def sync_every(model: nn.Module | Sequence[nn.Module], steps: Steps) -> Iterator[MicroStep]: ...
@overload
def sync_every(
    model: nn.Module | Sequence[nn.Module], steps: Steps, iterable: Iterable[T]
) -> Iterator[tuple[MicroStep, T]]: ...
def sync_every(
    model: nn.Module | Sequence[nn.Module], steps: Steps, iterable: Iterable[T] | None = None
) -> Iterator[MicroStep] | Iterator[tuple[MicroStep, T]]:
    """Micro-steps that synchronise once every `steps`, for a loop that keeps its own backward and update.

    With an iterable it yields `(MicroStep, item)` and closes the tail exactly, on ranks with different numbers of items
    too; without, it is endless, to zip with a loop. What runs in the loop's body is held or not by the step that it is
    in. Leaving the loop in any way leaves the model's engine as it was.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for step, batch in gradsync.sync_every(model, 2, torch.ones(5, 3, 1)):
    ...     step.backward(model(batch).square().mean())
    ...     if step.last:
    ...         print(step.window, step.index)
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    0 1
    1 1
    2 0
    """
    check_steps(steps)
    loop = _Loop(check_modules(model, "sync_every"), steps)
    return loop.endless() if iterable is None else loop.over(iterable)


def _what(window: int) -> str:
    """What ranks wait for each other with, in words."""
    return f"synchronising the gradients of window {window} of sync_every"


class _Loop:
    """One run of `sync_every`: its open window, and what the current micro-step has done so far."""

    def __init__(self, models: Sequence[nn.Module], steps: Steps) -> None:
        self._models = models
        self._steps = steps
        self._finite = False  # whether the data can end, and so ranks can differ
        self._more = False  # whether this rank has another item
        self._explicit = False  # whether the user calls step.backward, as far as seen
        self._current: MicroStep | None = None
        self._done: MicroStep | None = None
        self._plain: PlainBackward | None = None
        self._over: Callable[[], bool] | None = None  # to be called after the user's own backward
        self._hooks: list[LeafHooks] = []
        self._rows: Sequence[Row] | None = None
        self._openings: list[dict[str, Any]] = []  # what the ranks said as the loop began
        self._notice: Notice | None = None  # of windows that are not as planned on every rank

    def endless(self) -> Iterator[MicroStep]:
        self._begin()
        for number in count():
            size = window_size(self._steps, number)
            self._window.open(size)
            self._begin_window(number, 0)
            for index in range(size):
                step = MicroStep(index, number, size, index + 1 == size, replay=False, _loop=self)
                yield from self._place(step, step)

    def over(self, iterable: Iterable[T]) -> Iterator[tuple[MicroStep, T]]:
        self._finite = True
        self._begin()
        items = lookahead(iterable)
        upcoming = next(items, None)
        source = self._first_source(has_item=upcoming is not None, num_items=length(iterable))
        if upcoming is None:
            return  # on every rank, as they have agreed
        item = upcoming[0]
        for number in count():
            if source is None:
                return
            size = window_size(self._steps, number)
            self._window.open(size)
            self._begin_window(number, source)
            for index in range(size):
                replay = upcoming is None
                if upcoming is not None:
                    item, self._more = upcoming[0], not upcoming[1]
                # Where no forward communicates, a rank that has run out takes part once a window: in the
                # synchronisation, and so in the update.
                ended = self._nobody_has_more() if self._window.in_step else not self._more
                step = MicroStep(index, number, size, ended or index + 1 == size, replay, _loop=self)
                yield from self._place(step, (step, item))
                if not replay:
                    upcoming = next(items, None)
                if ended:
                    break
            source = self._next_source()

    def backward(self, step: MicroStep, loss: torch.Tensor | LossSum) -> None:
        """What `MicroStep.backward` does."""
        if step is not self._current:
            raise GradSyncError(
                f"Each micro-step runs one backward, in its own turn of the loop, but micro-step {step.index} of "
                f"window {step.window} ran {'a second one' if self._done is step else 'one out of turn'}. Add the "
                "losses up and call step.backward once."
            )
        self._current, self._done = None, step
        self._explicit = True
        for hooks in self._hooks:
            hooks.remove()
        try:
            notice = self._word(None if step.replay else loss) if step.last or self._window.owes_first else None
            if step.replay and self._window.in_step:
                self._rows = self._window.replay(loss, last=step.last, notice=notice, filled=False, called=True)
            elif step.replay:
                self._rows = self._window.reduce(notice=notice)
            else:
                self._rows = self._window.backward(loss, last=step.last, notice=notice, more=self._more)
        except RuntimeError as error:
            if is_lost(error):
                raise lost(error, _what(step.window)) from error
            raise
        if step.last:
            factor = self._window.factor(self._rows)
            if factor is None:
                discard(self._window.parameters)  # counts that add up to zero: nothing to average
            else:
                normalise(self._window.parameters, factor)

    # -- one turn of the loop ---------------------------------------------------------------------------------------

    def _place(self, step: MicroStep, value: T) -> Iterator[T]:
        """Hand out `value` with everything in place for `step`, and put everything back, however the turn ends."""
        self._current, self._done, self._over = step, None, None
        watch = not self._explicit and (step.last or self._window.owes_first)
        self._plain = PlainBackward(self._window.leaves, self._join) if watch else None
        self._hooks = [weightless(self._window.leaves)] if step.replay else []
        self._hooks += [self._plain] if self._plain is not None else []
        with self._window.hold, named_range("gradsync.sync" if step.last else "gradsync.hold"):
            try:
                yield value
            finally:
                for hooks in self._hooks:
                    hooks.remove()
                if self._over is not None and self._over():
                    # The user's backward raised what torch says of it, and no iterator can change that.
                    warnings.warn(waited(_what(step.window)), RuntimeWarning, stacklevel=3)
        if step.last and self._done is None and not (self._plain is not None and self._plain.began):
            raise GradSyncError(
                f"The last micro-step of a window must run a backward, which synchronises the window, but that of "
                f"window {step.window} ended without one. Call step.backward(loss) in each turn, or end the loop."
            )

    def _join(self) -> None:
        """The user's own backward has begun on a micro-step that synchronises."""
        step = self._current
        assert step is not None, "the hooks that call this live as long as a step's turn"
        self._over = self._window.join_running(
            last=step.last,
            weighs=not step.replay,
            notice=self._word(None),
            more=self._more,
            done=self._note,
        )

    def _note(self, rows: Sequence[Row] | None) -> None:
        self._rows = rows

    # -- ranks ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        rest(self._models)
        engines = attach(self._models, agree_on_model)
        parameters = list(dict.fromkeys(p for model in self._models for p in model.parameters()))
        self._window = OpenWindow(engines, parameters, tell_size=callable(self._steps))
        insist(meet(self._window.group, "the start of sync_every", {"steps": window_size(self._steps, 0)}))

    def _begin_window(self, number: int, source: int) -> None:
        if callable(self._steps) and self._window.in_step:
            with WaitingFor(lambda: f"comparing the steps of window {number} of sync_every"):
                self._window.agree_on_size(self._window.size)
        with WaitingFor(lambda: f"making the buffers equal for window {number} of sync_every"):
            self._window.share_buffers(source)

    def _first_source(self, *, has_item: bool, num_items: int | None) -> int | None:
        """The lowest rank with an item, whose buffers the first window begins with; None if there is no item at all."""
        group = self._window.group
        words = {
            **opening(None if self._window.in_step else group, "sync_every", held=0, left=num_items),
            "has_item": has_item,
            "items": num_items,
        }
        said = meet_with_data(group, self._window.twins, "the data of sync_every", words)
        self._openings = said
        if not any(words["has_item"] for words in said):
            return None
        empty = ranks_where(not words["has_item"] for words in said)
        if empty:
            raise GradSyncError(
                f"Every rank needs at least one item in sync_every, to run its forward with when it has run out, but "
                f"rank {empty} has none. Give it one, or use accumulating, whose .over needs none on DDP."
            )
        return 0

    def _word(self, loss: torch.Tensor | LossSum | None) -> Notice | None:
        """How ranks hear of what is not as planned; made at the first synchronisation, as the kind of loss shows."""
        if self._notice is None and self._finite and self._window.num_ranks > 1:
            topic = "the first synchronisation of sync_every"
            kind = agree_on_kind(self._window.group, topic, kind_of(loss))
            always = self._window.in_step or self._window.tells_size or kind == SUM
            self._notice = Notice() if always else Notice(self._window.group, self._openings, "sync_every")
        return self._notice

    def _nobody_has_more(self) -> bool:
        """Where forwards communicate, ranks agree on each micro-step."""
        return not any(row.more for row in self._window.step_together(more=self._more))

    def _next_source(self) -> int | None:
        if self._rows is None:
            return 0 if self._more else None
        return next((rank for rank, row in enumerate(self._rows) if row.more), None)
