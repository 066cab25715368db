"""`Run`: opens windows and closes them, one after another. The decorator and the iterator both use it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.amp import GradScaler
from torch.autograd import profiler

from gradsync._errors import GradSyncError
from gradsync._loss import LossSum, check_loss, no_gradient
from gradsync._state import ALL_RUNS
from gradsync.functional._team.backward import HELD, Order, RunBackward, backward
from gradsync.functional._team.hold import weightless
from gradsync.functional._team.team import Team
from gradsync.functional._update.contexts import both, named_range
from gradsync.functional._update.optimizers import owned
from gradsync.functional._window.boundary import Boundary, Held, Transport
from gradsync.functional._window.closing import Closing
from gradsync.functional._window.exchange import OUTSIDE, Exchange, compare_sizes
from gradsync.functional._window.place import RUNS, Place, Role
from gradsync.functional._window.share import Share
from gradsync.functional._window.terms import Terms, Who, window_size
from gradsync.functional._window.window import Window, insist_on_one_window, settle_travelling, weigh
from gradsync.ranks.meet import insist, meet


class Run:
    """Opens a window, takes micro-batches into it, closes it together with the other ranks, and opens the next.

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
        self.key = key  # names this run among those of its loop; the same on all ranks
        self.number = 0  # how many windows have closed
        self.num_changes = 0  # how often its calls came with other participants than before
        self._num_dropped = 0  # dropped micro-batches of closed windows
        self.team: Team | None = None
        self.window: Window | None = None
        self.replay: Any = None  # runs the last good micro-batch once more; has `is_alive`
        self.who = Who()
        # How gradients travel; `overlap` and `compress` put another way here.
        self.transport = Transport()
        self.exchange = OUTSIDE  # of the current place: a loop's, or that outside of loops
        ALL_RUNS[id(self)] = self

    @property
    def open_window(self) -> Window:
        """The open window, where one must be open."""
        if self.window is None:
            raise GradSyncError(f"{self.name} needs an open window here, but none is open. Call start() first.")
        return self.window

    @property
    def index(self) -> int:
        """How many places the open window has had, repeated ones too; 0 where none is open."""
        return 0 if self.window is None else self.window.index

    @property
    def always_sends(self) -> bool:
        """Whether each window has a table, where the current place is."""
        return self.exchange.has_an_end or bool(self.terms.skip) or callable(self.terms.steps)

    @property
    def num_dropped(self) -> int:
        """How many micro-batches were dropped."""
        return self._num_dropped + (0 if self.window is None else self.window.num_dropped)

    @property
    def can_repeat(self) -> bool:
        """Whether there is a micro-batch to run again."""
        return self.replay is not None and self.replay.is_alive

    def compare_too(self, words: Mapping[str, Any]) -> None:
        """Have the ranks compare these words, too, wherever they compare settings."""
        self.terms = replace(self.terms, words={**self.terms.words, **words})

    # -- a micro-batch ----------------------------------------------------------------------------------------------

    def start(self, who: Who, loop: Exchange | None = None) -> Place:
        """A call begins: returns its place. Opens a window if none is open."""
        if torch.is_inference_mode_enabled():
            raise no_gradient("this runs under torch.inference_mode()")
        window = self.window
        goes_on = window is not None
        if window is not None and window.has_synchronised:
            raise GradSyncError(
                f"A window of {self.name} must be closed before the next call begins, but it has synchronised and is "
                "still open. Make its update, and call close()."
            )
        self.who = who
        self.exchange = exchange = OUTSIDE if loop is None else loop
        exchange.begin(self)
        if window is None:
            window = self._opened()
        last = exchange.is_last_call(self) or window.index + 1 >= window.size
        place = Place(window.number, window.index, window.size, last)
        if goes_on and window.team.holds_inside:
            self.insist_on_same(place)  # a forward of other parameters could wait for the other ranks, or fail
        return place

    def insist_on_same(self, place: Place) -> None:
        """Raise if models or optimizers have changed since the window was opened.

        Asked before each backward, because the body may have changed them. In held places only `requires_grad` is
        compared, which is cheap.
        """
        window = self.window
        assert window is not None, "a place has been started"
        team = window.team
        if place.last:
            team.check(self.name, self.who.models, self.who.optimizers)
        else:
            team.check_trainable(self.name)

    def stand_in(self, loop: Exchange, role: Role) -> Place:
        """The place of this rank in a window of the other ranks, after its own data has ended."""
        self.exchange = loop
        window = self.window or self._opened()
        return Place(window.number, window.index, window.size, last=False, role=role)

    def holding(self, place: Place) -> AbstractContextManager[Any]:
        """A context for a micro-batch's forward and backward, in which the engines hold gradients back."""
        team = self.open_window.team
        hold = team.first_hold(self.name, self.who.models) if team.is_new else team.hold
        if place.role is not RUNS:
            hold = both(hold, weightless(team.engines, team.leaves))
        if not profiler._is_profiler_enabled:
            return hold
        return both(named_range("gradsync.sync" if place.last else "gradsync.hold"), hold)

    def backward(
        self,
        place: Place,
        loss: torch.Tensor | LossSum,
        *,
        scaler: GradScaler | None = None,
        run: RunBackward | None = None,
    ) -> Closing | None:
        """Run a micro-batch's backward, inside `holding`. In the last place the window synchronises.

        Returns None in a held place, and at the boundary what came to the window: make the update, then call `close`.
        An exception of a type in `skip` is not raised, unless a forward communicates; it drops the window on all ranks.
        The gradients of a replay weigh nothing.
        """
        window = self.open_window
        tensor, seed = check_loss(loss), None
        if place.role is RUNS:
            self.insist_on_same(place)
            tensor, seed = weigh(window, loss, scaler)
            window.add(loss)
        elif place.role is Role.MISSES:
            return self.miss(place)
        with self.passage(place) as passage:
            backward(tensor, passage.order, seed, run)
        return passage.closing

    def begin(self, place: Place, loss: torch.Tensor | LossSum) -> Held:
        """For a backward that the caller runs by itself: a context manager around it.

        `loss` is that of the whole micro-batch. Inside, the caller arms the engines of `order.armed` and runs the
        backward; `closing` is then what `Run.backward` would return.
        """
        self.insist_on_same(place)
        self.open_window.add(loss)
        return self.passage(place)

    def passage(self, place: Place, order: Order | None = None) -> Held:
        """What synchronises in a backward of this place, as a rule in its own order: a context manager around it."""
        window = self.window
        assert window is not None, "a place has been started"
        if place.index != window.index or window.has_synchronised:
            raise GradSyncError(
                f"Each place of {self.name} takes one backward, or is missed or dropped, but that of micro-batch "
                f"{place.index} of window {place.window} has had its own. Call start() for each micro-batch."
            )
        if order is None:
            order = self._order(window, place)
        return (Boundary if place.last else Held)(self, order)

    def miss(self, place: Place) -> Closing | None:
        """Run nothing in a place of `Role.MISSES`. In the last place, what is held synchronises without a backward."""
        if place.role is not Role.MISSES:
            raise GradSyncError(
                f"Only a place of Role.MISSES can be missed, but this one of {self.name} is of {place.role}, and the "
                "other ranks count on it. Run a micro-batch in it (in Role.REPEATS the last one, once more), and call "
                "backward(place, loss)."
            )
        with self.holding(place):
            return self._without_backward(place)

    def drop(self, place: Place) -> Closing | None:
        """Drop the micro-batch of this place: its call counts, and it adds nothing to the mean."""
        if not self.always_sends:
            raise GradSyncError(
                f"To drop a micro-batch, {self.name} needs a table in each window, from which the other ranks hear of "
                "it, but there is none. Say so beforehand, Terms(..., skip=(...)), or make the calls in a Loop."
            )
        self.open_window.drop()
        return self._without_backward(place)

    # -- a window ---------------------------------------------------------------------------------------------------

    def fitting_team(self) -> Team:
        """The team of the open window, or of the next. Collective where the team has to be made."""
        if self.window is not None:
            return self.window.team
        models, optimizers = self.who.models, self.who.optimizers
        if self.team is None or not self.team.fits(models, optimizers):
            inside = (one for model in models for one in model.parameters())
            settle_travelling({id(parameter) for parameter in (*owned(optimizers), *inside)}, always=self)
            self.team = Team(self.name, models, optimizers, sync=self.terms.sync, before=self.team)
        return self.team

    def make_way(self, team: Team) -> None:
        """Before a window of this team: land what travels to its parameters; raise if they are in another window."""
        insist_on_one_window(self.name, team.ids, but=self)
        settle_travelling(team.ids, never=self)

    def open(self, team: Team) -> Window:
        """Open a window of this team, which must fit the models and optimizers."""
        self.make_way(team)
        self.transport.check(team)
        size = window_size(self.terms.steps, self.number)
        self.window = Window(team, self.number, size, self.terms.keeps_losses)
        return self.window

    def close(self) -> None:
        """Close the window, after it has synchronised."""
        window = self.open_window
        if not window.has_synchronised:
            raise GradSyncError(
                f"A window of {self.name} can be closed when it has synchronised, but it has had {window.index} of "
                f"{window.size} micro-batches, and holds their gradients. Call flush(), or discard() to drop it."
            )
        window.team.close()
        self.abandon()
        self.number += 1

    def count(self, more: int) -> None:
        """Count a closed window again: -1 as its late update begins, 1 once it is made, for the tables."""
        self.number += more
        if self.window is not None:
            self.window.number += more

    def abandon(self) -> None:
        """Forget the open window. Its gradients stay."""
        self._num_dropped = self.num_dropped
        self.window = None

    def discard(self) -> None:
        """Discard the open window and its gradients, those inside engines too."""
        if self.window is not None:
            self.window.team.drop_gradients()
        self.abandon()

    def flush(self) -> Closing | None:
        """Close the open window now; None if no rank has one. Collective: the ranks agree first."""
        return self.flush_agreed() if self.agree_to_flush() else None

    def agree_to_flush(self) -> bool:
        """Whether any rank has an open window. Collective. Raises unless all have closed as many before it."""
        team, words = self.fitting_team(), {"number of closed windows at flush": self.number, **self.terms.words}
        said = meet(team.group, f"flush of {team.name}", {**words, "open": self.index})
        insist(said, words)
        return any(one["open"] for one in said)

    def flush_agreed(self) -> Closing | None:
        """Close the window that is open on any rank, as all ranks have agreed to."""
        self.exchange = OUTSIDE
        team = self.fitting_team()
        window = self.window or self.open(team)
        window.heard = team.tables.send(Share.of_window(window).row())
        return self.miss(Place(window.number, window.index, window.size, last=True, role=Role.MISSES))

    def in_words(self) -> dict[str, Any]:
        """What must be the same on all ranks, for them to compare."""
        return {"number of closed windows": self.number, **self.terms.in_words(self.number)}

    def go_on_from(self, number: int, num_dropped: int) -> None:
        """Set the numbers of closed windows and of dropped micro-batches, as a checkpoint has them."""
        self.number, self._num_dropped = number, num_dropped

    # -- inside -----------------------------------------------------------------------------------------------------

    def _opened(self) -> Window:
        """A window that is opened for the place that begins."""
        window = self.open(self.fitting_team())
        self.exchange.plan(self)
        return window

    def _without_backward(self, place: Place) -> Closing | None:
        order = self._order(self.open_window, place)
        # The first synchronisation of a static graph must run in a backward: this rank's next one does it.
        owes = not place.last and any(engine.owes_first for engine in order.armed)
        with self.passage(place, HELD if owes else order.without_backward()) as passage:
            pass
        return passage.closing

    def _order(self, window: Window, place: Place) -> Order:
        """How the engines synchronise in this place."""
        if window.sizes is not None:
            compare_sizes(window)
        if place.last:
            order = Order.of_boundary(window.active, window.size, window.asked)
            return order if place.role is RUNS else order.of_replay()
        # Where no forward of a trained model communicates, more synchronisations spare nothing, and ranks may come to a
        # boundary by other numbers of micro-batches (they ran out, or have discarded some): "each" waits for it.
        if self.terms.sync == "each" and any(engine.forward_communicates for engine in window.active):
            if window.team.num_ranks > 1:
                self.exchange.agree(self)  # a rank with another sync would wait at its boundary
            return Order.of_boundary(window.active, 1, window.asked)
        for engine in window.active:  # asked in each micro-batch, where a comprehension would cost more
            if engine.owes_first:
                return Order([one for one in window.active if one.owes_first])
        return HELD
