"""`Loop`: a loop over data that may end earlier on this rank than on others, whose windows this rank then joins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from types import CodeType
from typing import Any, TypeVar

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
from gradsync.functional._loop.data_ended import all_know_the_end, places_after_data, places_alone
from gradsync.functional._loop.items import Data
from gradsync.functional._loop.lockstep_of_forwards import Lockstep, StandIn
from gradsync.functional._loop.loop_exchange import LoopExchange
from gradsync.functional._loop.talk import Talk
from gradsync.functional._window.driver import Run
from gradsync.functional._window.table import NOBODY, UNKNOWN, Share
from gradsync.ranks.meet import meet_with_data, nothing_here

T = TypeVar("T")


class Loop:
    """What the calls in a loop share: where this rank's data is, and what the ranks have said of theirs."""

    def __init__(self, name: str, length: int | None, runs: Callable[[], Sequence[Run]] = list) -> None:
        """`runs` returns the runs that may be called in the loop, as far as this rank knows them."""
        self.name = name
        self.thread = get_ident()
        self.data = Data(length)
        self.is_superseded = False  # whether another loop of the same calls has begun before the end of this one
        self.called_from: tuple[Any, ...] = ()  # where the last call came from, if there were items without a call
        self.kept: dict[Run, Any] = {}  # keeps what a replay needs alive until the loop ends
        self.is_uneven = False  # whether ranks are known to have different numbers of items
        self.driver: tuple[int, CodeType] | None = None  # the function call that draws the items
        self._around: dict[Loop, int] = {}  # loops that were under way before it, and how many items they had had
        self._talk = Talk(name, runs)
        self._lockstep = Lockstep(self.data, self._talk)
        self._exchanges: dict[Run, LoopExchange] = {}

    def exchange(self, run: Run) -> LoopExchange:
        """The exchange of one run in this loop."""
        found = self._exchanges.get(run)
        if found is None:
            found = self._exchanges[run] = LoopExchange(run, self.data, self._talk, self._lockstep, self.meet)
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

    def rest(self) -> Iterator[StandIn]:
        """The places that this rank takes after its own data has ended, in its own open windows and in the others'.

        The caller repeats or misses each of them (its `role` says which), and closes windows, before the next.
        """
        self.data.end()
        try:
            talk = self._talk
            if (talk.chief is None and not self._meet_without_item()) or talk.team.num_ranks == 1:
                yield from places_alone(talk, self.exchange)
            elif not all_know_the_end(talk):
                zipped = [one.name for one in self._beside() if one.data.num_items != self._around.get(one)]
                refuse_to_rest(self.name, zipped)
                yield from places_after_data(talk, self._lockstep, self.exchange)
        finally:
            self.end()

    # -- other loops -------------------------------------------------------------------------------------------------

    def _beside(self) -> list[Loop]:
        """The other loops of this thread that are under way."""
        return [one for one in LOOPS if one is not self and is_running(one.driver)]

    # -- meetings ---------------------------------------------------------------------------------------------------

    def meet(self, run: Run) -> None:
        """The first call of a run in this loop begins."""
        talk = self._talk
        if talk.chief is None:
            self._meet(run)
        elif run.team is None:
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
                "left": None if here == UNKNOWN else here,
                "open": run.index,
                "once": data.calls_once(run),
                "can repeat": not data.has_ended or run.can_repeat,
                "around": next((other.name for other in self._beside() if other.is_uneven), None),
            },
        )
        insist_on_windows([one["windows"] for one in said])
        insist_on_even_around(self.name, [one["around"] for one in said])
        self.is_uneven = len({one["items"] for one in said} - {None}) > 1
        data.is_as_long = data.length is not None and all(one["items"] == data.length for one in said)
        talk.shares = [
            Share(
                left=UNKNOWN if one["left"] is None else one["left"],
                once=float(one["once"]),
                open=float(run.key) if one["open"] else NOBODY,
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
