"""One window after another: what the decorator and the iterator both drive."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from gradsync._errors import GradSyncError
from gradsync._registry import OPEN, TRAVELLING
from gradsync.functional._backward import NO_RANGE, Both, Joined, Order, backward, named_range, reduce
from gradsync.functional._leaf_hooks import weightless
from gradsync.functional._loss import LossSum, check_loss
from gradsync.functional._place import Part, Place
from gradsync.functional._share import IN_WORDS, NOTHING, PLAIN, SUMS, Closing, Share
from gradsync.functional._steps import Steps, check_steps, window_size
from gradsync.functional._team import Team
from gradsync.functional._update import owned
from gradsync.functional._window import Scale, Window
from gradsync.ranks.lost import WaitingFor, is_lost
from gradsync.ranks.meet import agreed, insist, meet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from gradsync.functional._backward import RunBackward
    from gradsync.functional._loop import Loop
    from gradsync.ranks.line import Sent


class Crossing(Protocol):
    """How the gradients of a run's windows cross to the other ranks."""

    def check(self, team: Team) -> None:
        """Raise for a team whose gradients cannot go this way; as a window opens."""

    def across(self, window: Window) -> AbstractContextManager[Any]:
        """What the synchronisation of a window is to be inside of."""
        ...


class _Plainly:
    """The engines' own way."""

    def check(self, team: Team) -> None: ...

    def across(self, window: Window) -> AbstractContextManager[Any]:  # noqa: ARG002 - that of the protocol
        return NO_RANGE


def _land(ids: Collection[int], *, of: Run | None = None, beside: Run | None = None) -> None:
    """Before a window takes these parameters: what travels to them lands, but for what is `of` or `beside` a run."""
    for other in list(TRAVELLING):
        if other.run is of or (other.run is not beside and not other.ids.isdisjoint(ids)):
            other.settle()


@dataclass(frozen=True)
class Terms:
    """What holds for all windows of a run, and must be the same on all ranks.

    `words` is what else the ranks are to compare. `skip` holds the exceptions that drop one micro-batch. `repeats`
    tells when a rank whose data has ended needs a micro-batch to repeat: where "forwards" wait for each other, or
    "always".
    """

    steps: Steps
    tail: str = "step"
    repeats: Literal["forwards", "always"] = "forwards"
    sync: str = "window"
    skip: tuple[type[BaseException], ...] = ()
    words: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_steps(self.steps)

    def in_words(self, number: int) -> dict[str, Any]:
        """To be compared as window `number` closes or opens."""
        steps = window_size(self.steps, number)
        skip = [kind.__name__ for kind in self.skip]
        return {"steps": steps, "tail": self.tail, "sync": self.sync, "skip": skip, **self.words}


class Who:
    """Whose windows they are: models, and optimizers of theirs; without optimizers, all models are trained.

    They are held weakly. Whoever drops a model and its optimizer drops their windows.
    """

    __slots__ = ("_models", "_optimizers")

    def __init__(self, models: Sequence[nn.Module] = (), optimizers: Sequence[Optimizer] = ()) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]

    @property
    def models(self) -> list[nn.Module]:
        """Those that are alive."""
        return [model for ref in self._models if (model := ref()) is not None]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that are alive."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]


class Departure:
    """The table of a window that closes, which leaves once."""

    __slots__ = ("_send", "sent")

    def __init__(self, send: Callable[[], Sent | None]) -> None:
        self._send = send
        self.sent: Sent | None = None

    def go(self) -> None:
        """Now."""
        self.sent = self._send()


class Begun(NamedTuple):
    """A backward that its driver runs by itself: how it synchronises, and the table that has left before it.

    `crossing` is what its synchronisation is inside of, entered already.
    """

    place: Place
    order: Order
    departure: Departure
    crossing: ExitStack


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
        self.num_dropped = 0
        self.team: Team | None = None
        self.window: Window | None = None
        self.last: Any = None  # the last good micro-batch, if its driver can run it again: has `is_alive`
        self.told: Window | None = None  # the one that was said to be left open
        self.who = Who()
        # What a window's synchronisation is to be inside of, where gradients go another way.
        self.crossing: Crossing = _Plainly()
        self._loop: Loop | None = None  # that of the current place
        self._heard: Sent | None = None  # what the ranks have said already of the window that closes
        self._kind = NOTHING  # of losses, as agreed on without a table
        self._seeds: dict[Any, torch.Tensor] = {}

    @property
    def index(self) -> int:
        """How many calls the open window has had; 0 where none is open."""
        return 0 if self.window is None else self.window.index

    @property
    def can_repeat(self) -> bool:
        """Whether a micro-batch could be run again."""
        return self.last is not None and self.last.is_alive

    # -- a micro-batch ----------------------------------------------------------------------------------------------

    def start(self, who: Who, loop: Loop | None = None) -> Place:
        """A call begins: its place. A window is opened if none is."""
        self.who, self._loop = who, loop
        if self.window is not None:
            self.window.team.check_trainable(self.name)
        elif loop is None:
            self.open(self.fit())
        if loop is not None:
            loop.enter(self)
        window = self._open_window
        ends = loop is not None and loop.ends(self)
        last = ends or window.index + 1 >= window.size
        if last and window.index:
            window.team.check(self.name, who.models, who.optimizers)
        return Place(window.number, window.index, window.size, last)

    def follow(self, loop: Loop) -> None:
        """Windows are opened and closed with the ranks of a loop, though no call comes here."""
        self._loop = loop

    def stand_in(self, part: Part, *, last: bool) -> Place:
        """The place of a rank whose data has ended, in a window of the others."""
        window = self.window or self.open(self.fit())
        return Place(window.number, window.index, window.size, last, part)

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
            return self._closing(lambda order: backward(tensor, order, seed=seed, run=run))
        try:
            backward(tensor, self._order_of_held(), seed=seed, run=run)
        except self.terms.skip as error:
            self._note_failure(error)
        window.index += 1
        return None

    def weigh(
        self, loss: torch.Tensor | LossSum, scaler: GradScaler | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the backward of a loss, or of a part of it, runs from, and what gradient it begins with (None: 1)."""
        window = self._open_window
        tensor = loss.loss if isinstance(loss, LossSum) else loss
        seed = None if isinstance(loss, LossSum) else window.seed(tensor)
        if scaler is not None and scaler.is_enabled():
            window.scale = window.scale or Scale.of(scaler, tensor)
            tensor = window.scale.apply(tensor)
        return tensor, seed

    def begin(self, place: Place, loss: torch.Tensor | LossSum) -> Begun:
        """One micro-batch's backward begins that its driver runs by itself; the table of a window that closes leaves.

        `loss` is that of the whole micro-batch. The driver arms `order.armed`, runs the backward and then calls `end`.
        """
        window = self._open_window
        window.add(loss)
        window.num_own += 1
        departure = Departure(self._send)
        with WaitingFor(self.what):
            order = self._order_of_boundary(departure) if place.last else self._order_of_held()
        crossing = ExitStack()
        if place.last:
            crossing.enter_context(self.crossing.across(window))
        return Begun(place, order, departure, crossing)

    def end(self, begun: Begun, error: BaseException | None = None) -> Closing | None:
        """That backward has ended, in `error` if it failed; what follows is as in `backward`."""

        def conclude() -> None:
            if error is None:
                begun.order.complete()
                return
            if not is_lost(error):
                begun.order.abort()
            raise error

        if begun.place.last:
            return self._closed(begun.departure, conclude, begun.crossing)
        try:
            conclude()
        except self.terms.skip as failure:
            self._note_failure(failure)
        self._open_window.index += 1
        return None

    def spoil(self, place: Place, error: BaseException) -> Closing | None:
        """A micro-batch failed before that backward, with gradients of it accumulated: all ranks drop the window."""
        self._note_failure(error)
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
                return self._closing(lambda order: backward(tensor, order, run=run))
            backward(tensor, self._order_of_held(), run=run)
        finally:
            zeros.remove()
        window.index += 1
        return None

    def miss(self, place: Place) -> Closing | None:
        """Nothing is run in this place; in the last one, what is held synchronises without a backward."""
        window = self._open_window
        if place.last:
            return self._closing(lambda _: reduce(window.active))
        window.index += 1
        return None

    def drop(self, place: Place) -> Closing | None:
        """A micro-batch that brings nothing, though it was called."""
        self.note_dropped()
        return self.miss(place)

    def note_dropped(self) -> None:
        """A call brings nothing; what is run in its place is another matter."""
        self._open_window.num_own += 1
        self.num_dropped += 1

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
        departure = Departure(self._send)
        order = self._order_of_boundary(departure) if place.last else self._order_of_held()

        def finish() -> None:
            if place.last:
                done(self._heard_all(departure.sent))
            else:
                window.index += 1
                done(None)

        joined = Joined(order, reached, finish)

        def over() -> bool:
            if joined.ended or joined.waits:
                return not joined.ended
            joined.abort()
            if place.last:
                self._complete_failed(departure.sent)
            return False

        return over

    # -- a window ---------------------------------------------------------------------------------------------------

    def fit(self) -> Team:
        """The team of the window that is open, or of the next one. Collective if it has to be made."""
        if self.window is not None:
            return self.window.team
        models, optimizers = self.who.models, self.who.optimizers
        if self.team is None or not self.team.fits(models, optimizers):
            _land(
                {id(p) for p in (*owned(optimizers), *(one for model in models for one in model.parameters()))}, of=self
            )
            shards = self.terms.sync == "shard"
            self.team = Team(self.name, models, optimizers, shards=shards, last=self.team)
            self._seeds.clear()
            self._kind = NOTHING
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
        _land(team.ids, beside=self)
        self.crossing.check(team)
        window = Window(team, self.number, window_size(self.terms.steps, self.number), self._seeds)
        if self._loop is not None:
            self._loop.plan(self, window)
        elif team.in_step and callable(self.terms.steps):
            self._agree_on_size(window)
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
        words = {"number of closed windows at flush": self.number}
        said = meet(self.fit().group, f"flush of {self.name}", {**words, "open": self.index})
        insist([{key: one[key] for key in words} for one in said])
        return any(one["open"] for one in said)

    def flush(self) -> Closing | None:
        """Close the open window now, as all ranks have agreed to. Collective."""
        self._loop = None
        team = self.fit()
        window = self.window or self.open(team)
        self._heard = self._ask(window.share(closing=self.key))
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

    # -- the other ranks --------------------------------------------------------------------------------------------

    def _closing(self, synchronise: Callable[[Order], None]) -> Closing:
        """Synchronise the window: the table leaves first, then what `synchronise` does."""
        departure = Departure(self._send)
        crossing = self.crossing.across(self._open_window)
        return self._closed(departure, lambda: synchronise(self._order_of_boundary(departure)), crossing)

    def _closed(
        self, departure: Departure, synchronise: Callable[[], None], crossing: AbstractContextManager[Any]
    ) -> Closing:
        """What came to the window once it is synchronised; the table leaves, or has left, with `departure`."""
        window = self._open_window
        with WaitingFor(self.what):
            try:
                with crossing:
                    synchronise()
            except BaseException as error:
                if not is_lost(error):
                    self._complete_failed(departure.sent)
                if not isinstance(error, self.terms.skip):
                    raise
                self._note_failure(error)
                return Closing(tuple(window.share() for _ in range(window.team.num_ranks)), window.team.rank, None)
            return self._heard_all(departure.sent)

    def _order_of_boundary(self, departure: Departure) -> Order:
        """That of the window's last micro-batch, before whose synchronisation the table leaves."""
        order = Order.of_boundary(self._open_window.active, self._open_window.size)
        if order.again:
            return order._replace(between=departure.go)
        departure.go()
        return order

    def _send(self) -> Sent | None:
        """Put this rank's share on its way, where the ranks cannot know of each other what they bring."""
        window = self._open_window
        sent, self._heard = self._heard, None
        if sent is not None:
            return sent
        if window.team.num_ranks == 1:
            return None
        if self._loop is not None:
            return self._ask(self._loop.share(self, window))
        self._agree_on_kind(window)
        if self._is_told(window) or window.num_own < window.size:
            return self._ask(window.share(closing=self.key))
        if window.kind != PLAIN and window.num_micro_batches != window.size:
            raise GradSyncError(
                f"The ranks of {self.name} count on {window.size} backwards in each window, for it does not know where "
                f"the data ends, but there were {window.num_micro_batches} in this one. Run a backward in each "
                "micro-batch, or give it the iterable: then ranks may differ."
            )
        return None

    def _is_told(self, window: Window) -> bool:
        """Whether the ranks tell each other what they bring, though they are not in a loop that ends."""
        return window.kind == SUMS or bool(self.terms.skip) or callable(self.terms.steps)

    def _ask(self, share: Share) -> Sent:
        assert self.team is not None, "fitted"
        return self.team.line.send(share.row())

    def _shares(self, sent: Sent | None) -> list[Share]:
        window = self._open_window
        if sent is None:
            share = window.share()
            if window.kind == SUMS:
                share = replace(share, count=float(share.count))  # a count on a device is waited for once
            return [share] * window.team.num_ranks
        return [Share.of(row) for row in sent.rows()] if self._loop is None else self._loop.hear(self, window, sent)

    def _heard_all(self, sent: Sent | None) -> Closing:
        """The gradients are synchronised: so are the buffers now, and what came is known."""
        window = self._open_window
        team = window.team
        shares = self._shares(sent)
        is_told = sent is not None or (team.num_ranks == 1 and (self._loop is not None or window.kind == SUMS))
        closing = Closing.of(shares, team.rank, is_told=is_told)
        self._share_buffers(window, shares)
        if self.terms.skip and team.num_ranks > 1 and team.line.any(float(window.failed)):
            return closing.without()
        return closing

    def _share_buffers(self, window: Window, shares: Sequence[Share]) -> None:
        """Make the buffers of all ranks those of the lowest one that was to have a micro-batch."""
        if window.team.num_ranks == 1:
            return
        due = self._loop.due if self._loop is not None else ()
        there = (r for r, share in enumerate(shares) if share.num_calls or (r < len(due) and due[r]))
        source = next(there, 0)
        for engine in window.active:
            engine.share_buffers(source)

    def _complete_failed(self, sent: Sent | None) -> None:
        """A backward has failed, and its collectives are complete: so are now those that come after it."""
        window = self._open_window
        try:
            self._share_buffers(window, self._shares(sent))
            if self.terms.skip and window.team.num_ranks > 1:
                window.team.line.any(1.0)
        except Exception as second:  # noqa: BLE001 - the first error goes on
            if is_lost(second):
                return

    def _note_failure(self, error: BaseException) -> None:
        """All ranks must drop this window, as they learn when it closes."""
        if self._open_window.team.forward_communicates or isinstance(error, GradSyncError) or is_lost(error):
            raise error
        self.num_dropped += 1
        self._open_window.failed = True
        self._open_window.team.drop_gradients()

    def _agree_on_kind(self, window: Window) -> None:
        """Before the first synchronisation without a loop: nothing may differ that would make ranks wait forever."""
        if window.kind == self._kind != NOTHING:
            return
        words = self.terms.in_words(self.number)
        said = meet(window.team.group, f"the first boundary of {self.name}", {**words, "loss": window.kind})
        insist([{key: one[key] for key in words} for one in said])
        agreed([(rank, IN_WORDS[one["loss"]]) for rank, one in enumerate(said) if one["loss"]], "kind of loss")
        self._kind = max(one["loss"] for one in said)

    def _agree_on_size(self, window: Window) -> None:
        """Where ranks take each micro-batch together, windows must be equally long from the start."""
        with WaitingFor(lambda: f"comparing the steps of window {self.number} of {self.name}"):
            rows = window.team.line.send([float(window.size)]).rows()
        agreed([(rank, int(row[0])) for rank, row in enumerate(rows)], "number of steps in a window")

    def _order_of_held(self) -> Order:
        window = self._open_window
        # Where ranks may run out at different times, one synchronisation a window is what they can count on.
        if self.terms.sync == "each" and (self._loop is None or window.team.num_ranks == 1 or window.team.in_step):
            return Order.of_boundary(window.active, 1)
        return Order.of_held(window.active)

    def _end(self) -> None:
        self.window = None
        self._heard = None
        OPEN.discard(self)

    @property
    def _open_window(self) -> Window:
        assert self.window is not None, "a place has been started"
        return self.window
