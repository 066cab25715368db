"""One window after another: what the decorator and the iterator both drive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gradsync._errors import GradSyncError
from gradsync._registry import OPEN
from gradsync.functional._backward import NO_RANGE, Both, Joined, Order, backward, named_range, reduce
from gradsync.functional._boundary import Begun, Boundary
from gradsync.functional._crossing import Plainly, land
from gradsync.functional._exchange import Counted, meet_at_flush
from gradsync.functional._leaf_hooks import weightless
from gradsync.functional._loss import LossSum, check_loss, no_gradient
from gradsync.functional._place import Part, Place
from gradsync.functional._share import PLAIN
from gradsync.functional._steps import window_size
from gradsync.functional._team import Team
from gradsync.functional._terms import Terms, Who
from gradsync.functional._update import owned
from gradsync.functional._window import Window
from gradsync.ranks.lost import WaitingFor, is_lost

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch.amp import GradScaler

    from gradsync.functional._backward import RunBackward
    from gradsync.functional._crossing import Crossing
    from gradsync.functional._exchange import Exchange, Lane, Lanes
    from gradsync.functional._share import Closing
    from gradsync.ranks.line import Sent


class Run:
    """Opens windows of a team, takes micro-batches into them, and closes them with the other ranks.

    >>> run, model = Run("example", Terms(steps=2)), torch.nn.Linear(1, 1)
    >>> who = Who([model])
    >>> for x in torch.ones(2, 1, 1):
    ...     place = run.start(who)
    ...     with run.holding(place):
    ...         closing = run.backward(place, model(x).sum())
    >>> closing.factor, run.close()
    (1.0, None)
    """

    def __init__(self, name: str, terms: Terms, key: int = 0) -> None:
        self.name = name
        self.terms = terms
        self.key = key  # which one it is among those of its loop: the same on all ranks
        self.number = 0  # of closed windows
        self._num_dropped = 0  # micro-batches of closed windows
        self.team: Team | None = None
        self.window: Window | None = None
        self.last: Any = None  # the last good micro-batch, if its driver can run it again: has `is_alive`
        self.told: Window | None = None  # the one that was said to be left open
        self.who = Who()
        # What a window's synchronisation is to be inside of, where gradients go another way.
        self.crossing: Crossing = Plainly()
        self._lane: Lane | None = None  # that of the current place, in a loop
        self._heard: Sent | None = None  # what the ranks have said already of the window that closes

    @property
    def index(self) -> int:
        """How many calls the open window has had; 0 where none is open."""
        return 0 if self.window is None else self.window.index

    @property
    def num_dropped(self) -> int:
        """How many micro-batches have brought nothing."""
        return self._num_dropped + (0 if self.window is None else self.window.num_dropped)

    @property
    def can_repeat(self) -> bool:
        """Whether a micro-batch could be run again."""
        return self.last is not None and self.last.is_alive

    # -- a micro-batch ----------------------------------------------------------------------------------------------

    def start(self, who: Who, loop: Lanes | None = None) -> Place:
        """A call begins: its place. A window is opened if none is."""
        if torch.is_inference_mode_enabled():
            raise no_gradient("this runs under torch.inference_mode()")
        self.who, lane = who, None if loop is None else loop.lane(self)
        self._lane = lane
        if self.window is not None:
            self.window.team.check_trainable(self.name)
        elif lane is None:
            self.open(self.fit())
        if lane is not None:
            lane.enter()
        window = self._open_window
        ends = lane is not None and lane.ends()
        last = ends or window.index + 1 >= window.size
        if last and window.index:
            window.team.check(self.name, who.models, who.optimizers)
        return Place(window.number, window.index, window.size, last)

    def stand_in(self, lane: Lane, part: Part) -> Place:
        """The place of a rank whose data has ended, in a window of the others in a loop."""
        self._lane = lane
        window = self.window or self.open(self.fit())
        return Place(window.number, window.index, window.size, last=False, part=part)

    def holding(self, place: Place) -> AbstractContextManager[Any]:
        """What a micro-batch's forward and backward are to be inside of."""
        hold = self._open_window.team.hold
        span = named_range("gradsync.sync" if place.last else "gradsync.hold")
        return hold if span is NO_RANGE else Both(span, hold)

    def backward(
        self,
        place: Place,
        loss: torch.Tensor | LossSum,
        *,
        scaler: GradScaler | None = None,
        run: RunBackward | None = None,
    ) -> Closing | None:
        """One micro-batch's backward, inside `holding`; in the last place the window synchronises, and closes.

        An exception of a type in `skip` drops the whole window on all ranks, and goes no further.
        """
        window = self._open_window
        window.take(loss)
        tensor, seed = self.weigh(loss, scaler)
        window.num_own += 1
        if place.last:
            return self._boundary().synchronise(lambda order: backward(tensor, order, seed=seed, run=run))
        try:
            backward(tensor, self._order_of_held(), seed=seed, run=run)
        except self.terms.skip as error:
            window.fail(error)
        window.index += 1
        return None

    def weigh(
        self, loss: torch.Tensor | LossSum, scaler: GradScaler | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the backward of a loss, or of a part of it, runs from, and what gradient it begins with (None: 1)."""
        return self._open_window.weigh(loss, scaler)

    def begin(self, place: Place, loss: torch.Tensor | LossSum) -> Begun:
        """One micro-batch's backward begins that its driver runs by itself; the table of a window that closes leaves.

        `loss` is that of the whole micro-batch. The driver arms `order.armed`, runs the backward and then calls `end`.
        """
        window = self._open_window
        window.add(loss)
        window.num_own += 1
        if not place.last:
            return Begun(self._order_of_held(), None)
        boundary = self._boundary()
        with WaitingFor(self.what):
            return Begun(boundary.begin(), boundary)

    def end(self, begun: Begun, error: BaseException | None = None) -> Closing | None:
        """That backward has ended, in `error` if it failed; what follows is as in `backward`."""

        def conclude() -> None:
            if error is None:
                begun.order.complete()
                return
            if not is_lost(error):
                begun.order.abort()
            raise error

        if begun.boundary is not None:
            return begun.boundary.conclude(conclude)
        try:
            conclude()
        except self.terms.skip as failure:
            self._open_window.fail(failure)
        self._open_window.index += 1
        return None

    def spoil(self, place: Place, error: BaseException) -> Closing | None:
        """A micro-batch failed before that backward, with gradients of it accumulated: all ranks drop the window."""
        self._open_window.fail(error)
        self._open_window.num_own += 1
        return self.miss(place)

    def repeat(self, place: Place, loss: torch.Tensor | LossSum, run: RunBackward | None = None) -> Closing | None:
        """The backward of a micro-batch that weighs nothing, for engines whose other ranks wait in it.

        Its gradients are replaced by zeros when they arrive: exact where `loss * 0` is not, with a NaN in it.
        """
        tensor = loss.loss if isinstance(loss, LossSum) else loss
        check_loss(tensor)
        window = self._open_window
        zeros = weightless(window.team.leaves)
        try:
            if place.last:
                return self._boundary().synchronise(lambda order: backward(tensor, order, run=run))
            backward(tensor, self._order_of_held(), run=run)
        finally:
            zeros.remove()
        window.index += 1
        return None

    def miss(self, place: Place) -> Closing | None:
        """Nothing is run in this place; in the last one, what is held synchronises without a backward."""
        window = self._open_window
        if place.last:
            return self._boundary().synchronise(lambda _: reduce(window.active))
        window.index += 1
        return None

    def drop(self, place: Place) -> Closing | None:
        """A micro-batch that brings nothing, though it was called."""
        self.note_dropped()
        return self.miss(place)

    def note_dropped(self) -> None:
        """A call brings nothing; what is run in its place is another matter."""
        self._open_window.num_own += 1
        self._open_window.num_dropped += 1

    @property
    def is_plain(self) -> bool:
        """Whether a backward that is not ours has been in the open window."""
        return self._open_window.kind == PLAIN

    def note_plain(self, place: Place) -> None:
        """A backward that is not ours has come, in a place that is held."""
        if place.part is Part.RUNS:
            self._open_window.kind = PLAIN

    def join(self, place: Place, reached: set[int], done: Callable[[Closing | None], None]) -> Callable[[], bool]:
        """A backward that is not ours has begun: synchronise in it, and call `done` at its end.

        `reached` gets the ids of the leaves that it comes to. What is returned is to be called when it is over, however
        it ended: it completes the collectives if the backward failed, and says whether that was in waiting for ranks.
        """
        window = self._open_window
        if place.part is Part.RUNS:
            window.num_micro_batches += 1
            window.num_own += 1
            window.kind = PLAIN
        boundary = self._boundary() if place.last else None
        order = self._order_of_held() if boundary is None else boundary.order()

        def finish() -> None:
            if boundary is not None:
                done(boundary.closing())
            else:
                window.index += 1
                done(None)

        joined = Joined(order, reached, finish)

        def over() -> bool:
            if joined.ended or joined.waits:
                return not joined.ended
            joined.abort()
            if boundary is not None:
                boundary.complete_failed()
            return False

        return over

    # -- a window ---------------------------------------------------------------------------------------------------

    def fit(self) -> Team:
        """The team of the window that is open, or of the next one. Collective if it has to be made."""
        if self.window is not None:
            return self.window.team
        models, optimizers = self.who.models, self.who.optimizers
        if self.team is None or not self.team.fits(models, optimizers):
            inside = (one for model in models for one in model.parameters())
            land({id(parameter) for parameter in (*owned(optimizers), *inside)}, of=self)
            self.team = Team(self.name, models, optimizers, sync=self.terms.sync, last=self.team)
        return self.team

    def open(self, team: Team) -> Window:
        """Begin a window of a team that fits."""
        for other in list(OPEN):
            if other is not self and other.window is not None and not team.ids.isdisjoint(other.team.ids):
                raise GradSyncError(
                    f"A parameter can be in one open window at a time, but {self.name} begins one with parameters that "
                    f"are in the open window of {other.name}. Call {other.name}.flush() or .reset() first, or keep the "
                    "other model out of one of the optimizers."
                )
        land(team.ids, beside=self)
        self.crossing.check(team)
        window = Window(team, self.number, window_size(self.terms.steps, self.number))
        self._exchange.plan(window)
        OPEN.add(self)
        self.window = window
        return window

    def close(self) -> None:
        """The window that has synchronised is over."""
        self._end()
        self.number += 1

    def pass_by(self) -> None:
        """A place has gone by, and we have run nothing in it."""
        self._open_window.num_own += 1
        self._open_window.index += 1

    def abandon(self) -> None:
        """The open window is no longer ours; its gradients are left as they are."""
        self._end()

    def discard(self) -> None:
        """Drop the open window with its gradients, inside the engines too."""
        if self.window is not None:
            self.window.team.drop_gradients()
        self._end()

    def agree_to_flush(self) -> bool:
        """Whether any rank has an open window to close before its end. Collective; it changes nothing."""
        return any(meet_at_flush(self.fit(), self.number, self.index))

    def flush(self) -> Closing | None:
        """Close the open window now, as all ranks have agreed to. Collective."""
        self._lane = None
        team = self.fit()
        window = self.window or self.open(team)
        self._heard = team.line.send(window.share(closing=self.key).row())
        with WaitingFor(self.what), team.hold:
            return self.miss(Place(window.number, window.index, window.size, last=True, part=Part.MISSES))

    def heard(self, sent: Sent) -> None:
        """The ranks have said already what they bring to the window that closes next."""
        self._heard = sent

    def in_words(self) -> dict[str, Any]:
        """What the ranks must have alike when they meet."""
        return {"number of closed windows": self.number, **self.terms.in_words(self.number)}

    def what(self) -> str:
        """What ranks wait for each other with, in words."""
        return f"synchronising the gradients of window {self.number} of {self.name}"

    def go_on_from(self, number: int, num_dropped: int) -> None:
        """So many windows have closed before, and so many micro-batches have brought nothing."""
        self.number, self._num_dropped = number, num_dropped

    # -- inside -----------------------------------------------------------------------------------------------------

    def _boundary(self) -> Boundary:
        """That of the open window, whose last micro-batch has come."""
        heard, self._heard = self._heard, None
        return Boundary(self._open_window, self.terms, self._exchange, self.crossing, heard)

    @property
    def _exchange(self) -> Exchange:
        return self._lane or Counted(self.terms, self.key)

    def _order_of_held(self) -> Order:
        window = self._open_window
        # Where ranks may run out at different times, one synchronisation a window is what they can count on.
        if self.terms.sync == "each" and (self._lane is None or window.team.num_ranks == 1 or window.team.in_step):
            return Order.of_boundary(window.active, 1)
        return Order.of_held(window.active)

    def _end(self) -> None:
        self._num_dropped = self.num_dropped
        self.window = None
        self._heard = None
        OPEN.discard(self)

    @property
    def _open_window(self) -> Window:
        assert self.window is not None, "a place has been started"
        return self.window
