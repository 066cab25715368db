"""`Loop`: a loop over data that may end earlier on this rank than on others, whose windows this rank then joins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from typing import Any, TypeVar

from gradsync._errors import GradSyncError
from gradsync._frames import driver_of
from gradsync._state import LOOPS
from gradsync.functional._loop.counted_items import CountedItems
from gradsync.functional._loop.first_call import beside, meet_at_first_call, meet_without_call, one_loop
from gradsync.functional._loop.knowledge import LoopKnowledge
from gradsync.functional._loop.lockstep_of_forwards import hear_of_call, plan_calls
from gradsync.functional._window.exchange import OUTSIDE, Exchange
from gradsync.functional._window.place import Place, Role
from gradsync.functional._window.run import Run
from gradsync.functional._window.share import ASKS, NOBODY, Share, shares_in
from gradsync.functional._window.terms import ends_with_data
from gradsync.ranks.lost import WaitingFor
from gradsync.ranks.tables import Sent

T = TypeVar("T")


class Loop(LoopKnowledge, Exchange):
    """What is common to the calls in a loop: where this rank's data is, and what the ranks have said of theirs.

    A share of a window in it always travels, and says how much data this rank has left.
    """

    has_an_end = True

    def __init__(self, name: str, length: int | None, runs: Callable[[], Sequence[Run]] = list) -> None:
        """`runs` returns the runs that may be called in the loop, as far as this rank knows them."""
        super().__init__(name, CountedItems(length), runs)
        self.thread = get_ident()
        self.is_superseded = False  # whether another loop of the same function has begun before the end of this one
        self.called_from: tuple[Any, ...] = ()  # where the last call came from, if there were items without a call
        self.kept: dict[Run, Any] = {}  # keeps what a replay needs alive until the loop ends
        # Loops that were under way before it, and how many items they had had.
        self._around: dict[LoopKnowledge, int] = {}
        self._num_changes: dict[Run, int] = {}  # of each run, at its first place in this loop
        self._ended: set[Run] = set()  # those of which the others know that this rank has closed its last window

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
        for run in self._num_changes:
            if run.exchange is self:  # another loop may have begun before this one is collected
                run.exchange = OUTSIDE
                if run.window is not None:
                    run.window.left_by_loop = True
        self._num_changes.clear()
        self.kept.clear()
        self._around.clear()

    def expect_one_call(self, run: Run) -> None:
        """Declare that the run is called once for each item."""
        self.data.most[run] = 1

    # -- the windows of its calls -----------------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        if run in self._ended:
            raise GradSyncError(
                f"The last item of {self.name} must have as many calls as the items before it, one, but another came "
                "for it, when the first had closed the last window on all ranks. Make equally many calls for each "
                "item, or call after the loop."
            )
        self.data.call(run)
        if run not in self.called:
            self._num_changes.setdefault(run, run.num_changes)
            meet_at_first_call(self, run)

    def is_last_call(self, run: Run) -> bool:
        if self.is_in_lockstep:
            ends = not any(share.left for share in hear_of_call(self, run, run.open_window.size))
        else:
            # With several runs, this rank cannot know whose window closes next: its last call closes none, and after
            # its data it asks the others. If all have equally many items, each closes its own.
            ends = not self.data.left(run) and (self.is_even or self.only_run is not None)
        return ends and ends_with_data(run.terms.tail)

    def plan(self, run: Run) -> None:
        plan_calls(self, run)

    def agree(self, run: Run) -> None:
        """Nothing to do: the ranks compared their settings when they met."""

    def send(self, run: Run) -> Sent:
        if not self.data.left(run):
            self._ended.add(run)
        sent = run.open_window.team.tables.send(self._share(run).row())
        if len(self.called) > 1:  # they are compared before gradients of different models meet
            self.check_same(shares_in(sent))
        return sent

    def hear(self, run: Run, sent: Sent) -> list[Share]:
        shares = shares_in(sent)
        self.check_same(shares)
        if any(share.left == ASKS for share in shares):
            # A rank whose data has ended may have several windows open, and did not know which of them closes.
            shares = shares_in(self.tell(self._share(run)))
        self.shares = shares
        return shares

    def due(self, run: Run) -> Sequence[bool]:
        num_ranks = run.open_window.team.num_ranks
        if len(self.shares) != num_ranks:  # the loop's first run is on this rank alone
            return [False] * num_ranks
        return [share.left >= 1 for share in self.shares]  # not where there is only PERHAPS another call

    def _share(self, run: Run) -> Share:
        """What this rank brings to the run's window, and what it says of its data."""
        share = Share(number=float(run.number)) if run.window is None else Share.of_window(run.window)
        changes = run.num_changes - self._num_changes.setdefault(run, run.num_changes)
        return self.with_data(run, share._replace(changes=float(changes)))

    # -- after the data ---------------------------------------------------------------------------------------------

    def end_data(self) -> None:
        """This rank's data has ended. If it has made no call, it meets the others now. `rest` does this, too."""
        if not self.data.has_ended:
            self.data.end()
            if not self.called:
                meet_without_call(self)
                # The other ranks, which have met in their first call, open its window now.
                if any(share.left for share in self.shares):
                    self.called[0].make_way(self.team)

    def rest(self) -> Iterator[tuple[Run, Place]]:
        """The places that this rank takes after its own data has ended, in its own open windows and in the others'.

        The caller repeats or misses each of them (its `role` says which), and closes windows, before the next.
        """
        try:
            self.end_data()
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
            mine = self._share(only)
        sent = self.tell(mine)
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
        self._num_changes.setdefault(run, run.num_changes)
        return run.stand_in(self, role)
