"""`Loop`: a loop over data that may end earlier on this rank than on others, whose windows this rank then joins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from typing import Any, TypeVar

from gradsync._frames import driver_of
from gradsync._state import LOOPS
from gradsync.functional._loop.counted_items import CountedItems
from gradsync.functional._loop.first_call import beside, meet_without_call, one_loop
from gradsync.functional._loop.knowledge import LoopKnowledge
from gradsync.functional._loop.lockstep_of_forwards import hear_of_call
from gradsync.functional._loop.loop_exchange import LoopExchange
from gradsync.functional._window.place import Place, Role
from gradsync.functional._window.run import Run
from gradsync.functional._window.share import ASKS, NOBODY, Share, shares_in
from gradsync.functional._window.terms import ends_with_data
from gradsync.ranks.lost import WaitingFor

T = TypeVar("T")


class Loop(LoopKnowledge):
    """What is common to the calls in a loop: where this rank's data is, and what the ranks have said of theirs."""

    def __init__(self, name: str, length: int | None, runs: Callable[[], Sequence[Run]] = list) -> None:
        """`runs` returns the runs that may be called in the loop, as far as this rank knows them."""
        super().__init__(name, CountedItems(length), runs)
        self.thread = get_ident()
        self.is_superseded = False  # whether another loop of the same function has begun before the end of this one
        self.called_from: tuple[Any, ...] = ()  # where the last call came from, if there were items without a call
        self.kept: dict[Run, Any] = {}  # keeps what a replay needs alive until the loop ends
        # Loops that were under way before it, and how many items they had had.
        self._around: dict[LoopKnowledge, int] = {}
        self._exchanges: dict[Run, LoopExchange] = {}

    def exchange(self, run: Run) -> LoopExchange:
        """The exchange of one run in this loop."""
        found = self._exchanges.get(run)
        if found is None:
            found = self._exchanges[run] = LoopExchange(run, self)
        return found

    def items(self, iterable: Iterable[T]) -> Iterator[T]:
        """The items of an iterable, counted.

        Where the length is not known, one item is drawn ahead; two where ranks tell each other of the next call before
        it begins.
        """
        self.driver = driver_of(sys._getframe(1))
        self._around = {other: other.data.num_items for other in beside(self)}
        LOOPS.add(self)
        return self.data.items(iterable, self.name, lambda: 2 if self.is_in_lockstep else 1)

    def end(self) -> None:
        """The loop is over, or was left. What it knows of its runs goes now, and waits for no garbage collection."""
        LOOPS.discard(self)
        for run in self._exchanges:
            run.leave_loop()
        self._exchanges.clear()
        self.kept.clear()
        self._around.clear()

    def expect_one_call(self, run: Run) -> None:
        """Declare that the run is called once for each item."""
        self.data.most[run] = 1

    # -- after the data ---------------------------------------------------------------------------------------------

    def rest(self) -> Iterator[tuple[Run, Place]]:
        """The places that this rank takes after its own data has ended, in its own open windows and in the others'.

        The caller repeats or misses each of them (its `role` says which), and closes windows, before the next.
        """
        self.data.end()
        try:
            if not self.called:
                meet_without_call(self)
            zipped = [one.name for one in beside(self) if one.data.num_items != self._around.get(one)]
            if zipped and not self.is_over and self.team.num_ranks > 1:
                raise one_loop(
                    f"this rank has run out in {self.name}, and others may not have, while {zipped[0]} goes on "
                    "beside it"
                )
            with WaitingFor(lambda: f"the windows of {self.name} that other ranks may still have"):
                while not self.is_over and (turn := self._next()) is not None:
                    yield turn
        finally:
            self.end()

    def _next(self) -> tuple[Run, Place] | None:
        """The next place in a window that has not closed on all ranks, after this rank's data has ended."""
        return self._next_call() if self.is_in_lockstep else self._next_window()

    def _next_window(self) -> tuple[Run, Place] | None:
        """The next window that any rank closes. No forward communicates: only its last place matters here."""
        only = self.only_run
        mine = Share(left=ASKS, open=self.first_open)
        if only is not None:
            # To make a team is collective: after a change of models, the other ranks make it as they open their window.
            only.fitting_team()
            mine = self.exchange(only).share(only.window)
        sent = self.send(mine)
        run = self.run_to_close(shares_in(sent))
        if run is None:
            return None
        turn = self._last(run)
        run.open_window.heard = sent
        return turn

    def _next_call(self) -> tuple[Run, Place] | None:
        """The next call of any rank, where forwards communicate."""
        only, size = self.only_run, 0
        if only is not None and any(share.left for share in self.shares):
            size = self._place(only, Role.MISSES).size  # opens a window if none is, and plans it, like the others
        shares = hear_of_call(self, self.called[0], size)
        run = self.run_to_close(shares)
        if run is None:
            if only is not None and not only.index:
                only.discard()  # what was opened for a window that did not come
            return None
        if all(share.run_key == NOBODY for share in shares):  # nobody runs it: a window that was left open closes
            return self._last(run)
        place = self._place(run, Role.REPEATS if run.fitting_team().forward_communicates else Role.MISSES)
        nobody_left = not any(share.left for share in shares) and ends_with_data(run.terms.tail)
        is_full = place.index + 1 >= (max(share.size for share in shares) or place.size)
        return run, place._replace(last=is_full or nobody_left)

    def _last(self, run: Run) -> tuple[Run, Place]:
        return run, self._place(run, Role.MISSES)._replace(last=True)

    def _place(self, run: Run, role: Role) -> Place:
        return run.stand_in(self.exchange(run), role)
