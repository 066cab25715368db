"""`sync_every`: the windows of a loop that stays the user's own."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload

from gradsync._errors import GradSyncError
from gradsync.engines import rest
from gradsync.functional._fitted import OneBackward
from gradsync.functional._gradients import normalise
from gradsync.functional._leaf_hooks import PlainBackward, weightless
from gradsync.functional._loop import Loop
from gradsync.functional._loss import LossSum
from gradsync.functional._no_sync import check_modules
from gradsync.functional._place import Part, Place
from gradsync.functional._run import Run
from gradsync.functional._stream import length
from gradsync.functional._terms import Terms, Who
from gradsync.functional._turn_checks import StepWatch, insist_on_none_inside, insist_on_none_left, leave
from gradsync.ranks.group import require_group
from gradsync.ranks.lost import waited
from gradsync.ranks.meet import insist, meet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch
    from torch import nn

    from gradsync.functional._backward import RunBackward
    from gradsync.functional._fitted import Fitted
    from gradsync.functional._share import Closing
    from gradsync.functional._steps import Steps

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class MicroStep:
    """One micro-batch's place in its window, and its backward.

    `size` is what the window was planned to have; a tail ends sooner. `last` tells that the window closes in this
    turn. A `replay` is an item that was handed out before: the other ranks need this one to take part, and its
    gradients weigh nothing.
    """

    index: int
    window: int
    size: int
    last: bool
    replay: bool
    _turn: _Turn = field(repr=False)

    def backward(
        self, loss: torch.Tensor, *, count: float | torch.Tensor | None = None, run: RunBackward | None = None
    ) -> None:
        """Scale the loss and run its backward; on the last micro-step, synchronise and normalise the gradients.

        Afterwards, on the last one, each gradient is the mean over all micro-batches of all ranks in the window. With
        `count`, `loss` is a sum over `count` items, and the gradient is that of all sums over all counts. With AMP,
        pass `scaler.scale(loss)`. `run` says who runs the backward: `run=accelerator.backward`.
        """
        self._turn.backward(self, loss if count is None else LossSum(loss, count), run)

    @property
    def empty(self) -> bool:
        """Whether the window that this step has closed held nothing to average: counts that add up to zero.

        There are no gradients then. `optimizer.step()` does nothing, and a GradScaler must not be asked to step.
        """
        return self._turn.is_empty


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
    models = check_modules(model, "sync_every")
    run = Run("sync_every", Terms(steps, repeats="always"))
    require_group("sync_every")
    return _endless(run, models) if iterable is None else _over(run, models, iterable)


def _endless(run: Run, models: Sequence[nn.Module]) -> Iterator[MicroStep]:
    rest(models)
    who, turn = Who(models), _Turn(run)
    try:
        while True:
            place = run.start(who)
            if place.window == place.index == 0:
                insist(meet(run.fit().group, "the start of sync_every", {"steps": place.size}))
            step = turn.step(place)
            yield from turn.take(step, place, step)
    except BaseException as error:
        leave(run, error, sys._getframe(0).f_back)
        raise
    run.abandon()


def _over(run: Run, models: Sequence[nn.Module], iterable: Iterable[T]) -> Iterator[tuple[MicroStep, T]]:
    rest(models)
    who, turn = Who(models), _Turn(run)
    run.who = who
    loop = Loop("sync_every", length(iterable), lambda: [run])
    loop.calls_once(run)
    item: Any = None
    try:
        for item in loop.items(iterable):
            place = run.start(who, loop)
            step = turn.step(place)
            yield from turn.take(step, place, (step, item))
        for _, place in loop.rest():
            step = turn.step(place)
            yield from turn.take(step, place, (step, item))
    except BaseException as error:
        leave(run, error, sys._getframe(0).f_back)
        raise
    run.abandon()


class _Turn:
    """What the current micro-step has done so far."""

    def __init__(self, run: Run) -> None:
        self.is_empty = False
        self._run = run
        self._explicit = False  # whether the user calls step.backward, as far as seen
        self._place: Place | None = None
        self._current: MicroStep | None = None
        self._done: MicroStep | None = None
        self._plain: PlainBackward | None = None
        self._over: Callable[[], bool] | None = None  # to be called after the user's own backward
        self._closing: Closing | None = None

    def step(self, place: Place) -> MicroStep:
        """A place, as its user sees it."""
        return MicroStep(place.index, place.window, place.size, place.last, place.part is not Part.RUNS, self)

    def take(self, step: MicroStep, place: Place, value: T) -> Iterator[T]:
        """Hand out `value` with everything in place for `step`, and put everything back, however the turn ends."""
        run = self._run
        self._place, self._current, self._done, self._over, self._closing = place, step, None, None, None
        self.is_empty = False
        hooks = self._hooks(place)
        with run.holding(place):
            try:
                yield value
            finally:
                for one in [*hooks, self._plain]:
                    if one is not None:
                        one.remove()
                if self._over is not None and self._over():
                    # The user's backward raised what torch says of it, and no iterator can change that.
                    warnings.warn(waited(run.what()), RuntimeWarning, stacklevel=3)
        if place.last and self._closing is None:
            raise GradSyncError(
                f"The last micro-step of a window must run a backward, which synchronises the window, but that of "
                f"window {step.window} ended without one. Call step.backward(loss) in each turn, or end the loop."
            )
        if place.last:
            run.close()
        elif self._done is None and self._over is None:
            run.pass_by()

    def backward(self, step: MicroStep, loss: torch.Tensor | LossSum, runs: RunBackward | None) -> None:
        """What `MicroStep.backward` does."""
        place = self._begin(step)
        if place.part is Part.RUNS:
            self._close(self._run.backward(place, loss, run=runs))
        elif place.part is Part.REPEATS:
            self._close(self._run.repeat(place, loss, run=runs))
        else:
            self._close(self._run.miss(place))

    def in_parts(
        self,
        step: MicroStep,
        fitted: Fitted,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What a `Fitting` does: forward and backward in one."""
        place = self._begin(step)
        if place.part is Part.MISSES:
            returned = fitted.run_forward(function, args, kwargs)
            self._close(self._run.miss(place))
            return returned
        one = OneBackward(self._run, place)
        try:
            returned = fitted.run(one, function, args, kwargs)
        except BaseException as error:
            one.end(error)  # which raises it, once the collectives that it began are complete
            raise
        self._close(one.end())
        return returned

    def _begin(self, step: MicroStep) -> Place:
        """The one backward of a step begins, in its own turn."""
        if step is not self._current or self._over is not None:
            again = self._done is step or self._over is not None
            raise GradSyncError(
                f"Each micro-step runs one backward, in its own turn of the loop, but micro-step {step.index} of "
                f"window {step.window} ran {'a second one' if again else 'one out of turn'}. Add the losses up and "
                "call step.backward once."
            )
        place = self._place
        assert place is not None, "a step has one"
        if self._run.is_plain:
            raise self._mixed(place)
        if not place.index:
            insist_on_none_left(self._run.fit())
        self._current, self._done = None, step
        self._explicit = True
        if self._plain is not None:
            self._plain.remove()
        return place

    def _close(self, closing: Closing | None) -> None:
        """The backward has ended; `closing` is that of the window, if this closes it."""
        self._closing = closing
        if closing is None:
            return
        team = self._run.fit()
        self._watch_plain()
        self.is_empty = closing.factor is None
        if closing.factor is None:
            team.drop_gradients()
        else:
            normalise(team.parameters, closing.factor)

    def _hooks(self, place: Place) -> list[Any]:
        """What watches over a turn: a step of the optimizer that comes too soon, a backward that is not ours."""
        run, team = self._run, self._run.fit()
        hooks: list[Any] = []
        self._plain = None
        if not place.index:
            insist_on_none_inside(team)
        if not place.last:
            hooks.append(StepWatch(run))
        if place.part is not Part.RUNS:
            hooks.append(weightless(team.leaves))
        # With step.backward, one look a window is enough: held turns have the same body.
        if place.last or not self._explicit:
            self._watch_plain()
        return hooks

    def _watch_plain(self) -> None:
        """From here to the end of the turn: see a backward of the user's own."""
        team = self._run.fit()
        self._plain = PlainBackward(team.leaves, self._join, team.swapped)

    def _join(self) -> None:
        """The user's own backward has come to a parameter."""
        place, plain = self._place, self._plain
        assert place is not None, "the hooks that call this live as long as a step's turn"
        assert plain is not None, "the hooks that call this live as long as a step's turn"
        if self._explicit:
            raise self._mixed(place)
        self._run.note_plain(place)
        if not place.last and not any(engine.owes_first for engine in self._run.fit().engines):
            return
        if self._over is None:
            self._over = self._run.join(place, plain.reached, self._note)
        elif self._closing is not None and place.last:
            raise GradSyncError(
                f"The last micro-step of a window runs one backward, which synchronises the window, but in that of "
                f"window {place.window} a second one came, whose gradients would stay on this rank. Add the losses up, "
                "and run backward once."
            )

    def _mixed(self, place: Place) -> GradSyncError:
        """Both kinds of backward have come in a window."""
        return GradSyncError(
            f"Every backward of a window runs through step.backward, once in each micro-step, or none does, but in "
            f"micro-step {place.index} of window {place.window} a plain backward of the same model came beside it. "
            "That one is neither scaled nor, on the last micro-step, synchronised. Add the losses up, and call "
            "step.backward once; torch.autograd.grad is no backward."
        )

    def _note(self, closing: Closing | None) -> None:
        self._closing = closing
