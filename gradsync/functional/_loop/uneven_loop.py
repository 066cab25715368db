"""`Loop`: a loop over data that may end earlier on this rank than on others, whose windows this rank then joins."""

from __future__ import annotations

import math
import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from gradsync._errors import GradSyncError
from gradsync._frames import driver_of, is_running
from gradsync._state import LOOPS
from gradsync.functional._loop.checks import (
    check_lengths,
    check_repeats,
    insist_on_even_around,
    insist_on_windows,
    refuse_join,
    refuse_to_rest,
)
from gradsync.functional._loop.items import Data
from gradsync.functional._loop.lockstep import Lockstep, StandIn
from gradsync.functional._loop.talk import Talk
from gradsync.functional._window.exchange import Exchange, alike
from gradsync.functional._window.place import Role
from gradsync.functional._window.table import NOBODY, Share
from gradsync.functional._window.tail import ends_with_data
from gradsync.ranks.lost import WaitingFor
from gradsync.ranks.meet import meet_with_data, nothing_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import CodeType

    from gradsync.functional._window.place import Place
    from gradsync.functional._window.run import Run
    from gradsync.functional._window.window import Window
    from gradsync.ranks.line import Sent

T = TypeVar("T")

_ASKS = -1.0  # in place of `left`: this rank does not know which window closes, and asks


class Loop:
    """What the calls in a loop share: where this rank's data is, and what the ranks have said of theirs."""

    def __init__(self, name: str, length: int | None, runs: Callable[[], Sequence[Run]] = list) -> None:
        """`runs` returns the runs that may be called in the loop, as far as this rank knows them."""
        self.name = name
        self.thread = get_ident()
        self.data = Data(length)
        self.is_superseded = False  # whether another loop of the same calls has begun before the end of this one
        self.called_from: object = None  # where the last call came from, if there were items without a call
        self.kept: dict[Run, Any] = {}  # keeps what a replay needs alive until the loop ends
        self.is_uneven = False  # whether ranks are known to have different numbers of items
        self.driver: tuple[int, CodeType] | None = None  # the function call that draws the items
        self._around: dict[Loop, int] = {}  # loops that were under way before it, and how many items they had had
        self._talk = Talk(name, runs)
        self._lockstep = Lockstep(self.data, self._talk)
        self._exchanges: dict[Run, _InLoop] = {}
        self.is_as_long = True  # whether all ranks are known to have as many items

    def exchange(self, run: Run) -> _InLoop:
        """The exchange of one run in this loop."""
        found = self._exchanges.get(run)
        if found is None:
            found = self._exchanges[run] = _InLoop(run, self, self._talk, self._lockstep)
        return found

    @property
    def called(self) -> Sequence[Run]:
        """The runs that were called, in the order of their first call."""
        return self._talk.called

    # -- a call -----------------------------------------------------------------------------------------------------

    def items(self, iterable: Iterable[T]) -> Iterator[T]:
        """The items of an iterable, counted.

        Where the length is not known, one item is drawn ahead; two where ranks tell each other of the next call before
        it begins.
        """
        self.driver = driver_of(sys._getframe(1))
        self._around = {other: other.data.num_items for other in self._beside()}
        LOOPS.add(self)
        return self.data.items(iterable, self.name, lambda: 2 if self._talk.is_in_lockstep else 1)

    def end(self) -> None:
        """The loop is over, or was left."""
        LOOPS.discard(self)
        self.kept.clear()
        self._around.clear()

    def calls_once(self, run: Run) -> None:
        """Declare that the run is called once for each item."""
        self.data.expect_one_call(run)

    # -- after this rank's data -------------------------------------------------------------------------------------

    def rest(self) -> Iterator[StandIn]:
        """The places that this rank takes after its own data has ended, in its own open windows and in the others'.

        The caller repeats or misses each of them (its `role` says which), and closes windows, before the next.
        """
        self.data.end()
        try:
            yield from self._rest()
        finally:
            self.end()

    def _rest(self) -> Iterator[StandIn]:
        if (self._talk.chief is None and not self._meet_without_item()) or self._talk.team.num_ranks == 1:
            yield from self._close_alone()
            return
        if not self._all_know_the_end:
            refuse_to_rest(self.name, [other.name for other in self._beside() if self._takes_turns_with(other)])
        with WaitingFor(lambda: f"the windows of {self.name} that other ranks may still have"):
            while not self._all_know_the_end:
                turn = self._lockstep.next(self._stand_in) if self._talk.is_in_lockstep else self._next()
                if turn is None:
                    return
                yield turn

    @property
    def _all_know_the_end(self) -> bool:
        """Whether all ranks have told each other that they have no more items."""
        runs = self._talk.known
        return (
            len(runs) == 1
            and runs[0].window is None
            and not any(share.left or share.open != NOBODY for share in self._talk.shares)
        )

    def _close_alone(self) -> Iterator[StandIn]:
        for run in self._talk.known:
            if run.window is not None and ends_with_data(run.terms.tail):
                yield StandIn(run, self._stand_in(run, Role.MISSES)._replace(last=True))

    def _next(self) -> StandIn | None:
        """The next window that any rank closes, where no forward communicates."""
        talk, runs = self._talk, self._talk.known
        alone = runs[0] if len(runs) == 1 else None
        if alone is not None:
            alone.fitting_team()  # collective where participants have changed: the others make it as a window opens
        mine = Share(open=talk.first_open, left=0.0 if alone else _ASKS)
        if alone is not None:
            mine = mine._replace(changes=self.exchange(alone).changes, number=float(alone.number))
            if alone.window is not None:
                mine = alone.window.share(opened=talk.first_open, changes=mine.changes)
        sent = talk.send(mine)
        closing = talk.closing([Share.of(row) for row in sent.rows()])
        if closing is None:
            return None
        place = self._stand_in(closing, Role.MISSES)._replace(last=True)
        assert closing.window is not None, "opened by now"
        closing.window.heard = sent
        return StandIn(closing, place)

    def _stand_in(self, run: Run, role: Role) -> Place:
        return run.stand_in(self.exchange(run), role)

    # -- other loops -------------------------------------------------------------------------------------------------

    def _beside(self) -> list[Loop]:
        """The other loops of this thread that are under way."""
        others = [one for one in LOOPS if one is not self and one.thread == self.thread]
        return [one for one in others if is_running(one.driver)]

    def _takes_turns_with(self, other: Loop) -> bool:
        """Whether the two loops are zipped, not nested."""
        return other.data.num_items != self._around.get(other)

    # -- meetings ---------------------------------------------------------------------------------------------------

    def meet(self, run: Run) -> None:
        """The first call of a run in this loop begins."""
        talk = self._talk
        if talk.chief is None:
            self._meet(run)
        elif run.team is None and talk.team.num_ranks > 1:
            talk.announce(run)
        talk.called.append(run)
        talk.check_keys()

    def _meet(self, run: Run) -> None:
        """At the first call, or at the end of the data without a call: compare settings, and hear who has items."""
        team, data, talk = run.fitting_team(), self.data, self._talk
        talk.chief = run
        if team.num_ranks > 1:
            refuse_join(self.name, team.engines)
        here = data.left(run) + (not data.has_ended)
        said = meet_with_data(
            team.group,
            team.twins,
            f"the data of {self.name}",
            {
                "windows": {str(one.key): one.in_words() for one in {*talk.known, run}},
                "items": data.length,
                "left": None if math.isinf(here) else here,
                "open": run.index,
                "once": data.calls_once(run),
                "can repeat": not data.has_ended or run.can_repeat,
                "around": next((other.name for other in self._beside() if other.is_uneven), None),
            },
        )
        insist_on_windows([one["windows"] for one in said])
        insist_on_even_around(self.name, [one["around"] for one in said])
        self.is_uneven = len({one["items"] for one in said} - {None}) > 1
        self.is_as_long = data.length is not None and all(one["items"] == data.length for one in said)
        talk.shares = [
            Share(
                left=math.inf if one["left"] is None else one["left"],
                once=float(one["once"]),
                open=one["open"] or NOBODY,
            )
            for one in said
        ]
        anything = any(share.left for share in talk.shares) or any(one["open"] for one in said)
        owes = any(engine.owes_first for engine in team.engines)  # all ranks must run its very first micro-batch
        if anything and (team.forward_communicates or owes or run.terms.repeats == "always"):
            check_repeats([one["can repeat"] for one in said], self.name)
        if team.has_sync_batchnorm and team.num_ranks > 1:
            check_lengths([one["items"] for one in said], self.name)

    def _meet_without_item(self) -> bool:
        """This rank has made no call in this loop: meet the other ranks; returns whether there are any."""
        runs = self._talk.known
        if not runs:
            nothing_here(f"the data of {self.name}")
            return False
        run = next((run for run in runs if run.window is not None), runs[0])
        if run.fitting_team().num_ranks == 1:
            return False
        self._meet(run)
        return True


class _InLoop(Exchange):
    """The exchange of one run in a loop. A share always travels, and says how much data this rank has left."""

    has_an_end = True

    def __init__(self, run: Run, loop: Loop, talk: Talk, lockstep: Lockstep) -> None:
        super().__init__(run.terms)
        self._run = run
        self._loop = loop
        self._talk = talk
        self._lockstep = lockstep
        self._num_changes = run.num_changes  # at its first call in this loop
        self._has_told_end = False  # whether the others know that this rank has closed its last window

    @property
    def changes(self) -> float:
        """How often the run's calls came with other participants, since the first in this loop."""
        return float(self._run.num_changes - self._num_changes)

    def enter(self, run: Run) -> bool:
        loop, talk, data = self._loop, self._talk, self._loop.data
        if self._has_told_end and talk.team.num_ranks > 1:
            raise GradSyncError(
                f"Each item of {loop.name} has had one call, and so the call for the last item has closed the last "
                "window, on all ranks; but one more call came for it. Make as many calls for each item, or call after "
                "the loop."
            )
        data.call(run)
        if run not in talk.called:
            loop.meet(run)
        window = run.window
        if window is None:
            window = run.open(run.fitting_team())
            self.plan(window)
        if talk.is_in_lockstep:
            ends = self._lockstep.ends(run, window)
        else:
            # With several runs, another run's window may close first, on a rank with more items. `rest` asks.
            ends = data.is_in_last_call(run) and (loop.is_as_long or len(talk.known) <= 1)
        return ends and ends_with_data(run.terms.tail)

    def plan(self, window: Window) -> None:
        self._lockstep.plan(self._run, window)

    def agree(self, window: Window) -> None:
        """Nothing to do: the ranks compared their settings when they met."""

    def send(self, window: Window) -> Sent | None:
        return window.team.line.send(self._share(window).row())

    def shares(self, window: Window, sent: Sent | None) -> list[Share]:
        if sent is None:
            return alike(window)
        talk = self._talk
        shares = [Share.of(row) for row in sent.rows()]
        talk.check_same(shares)
        if any(share.left == _ASKS for share in shares):
            # A rank whose data has ended may have several windows open, and did not know which of them closes.
            shares = [Share.of(row) for row in talk.send(self._share(window)).rows()]
        talk.shares = shares
        return shares

    @property
    def due(self) -> Sequence[bool]:  # type: ignore[override] # read only
        return [share.left > 0 for share in self._talk.shares]

    def _share(self, window: Window) -> Share:
        run, data = self._run, self._loop.data
        once, left = float(data.calls_once(run)), data.left(run)
        self._has_told_end = left == 0
        opened = self._talk.first_open if data.has_ended else NOBODY
        return window.share(closing=float(run.key), opened=opened, left=left, once=once, changes=self.changes)
