"""`LoopExchange`: what a rank tells the others of a window in a loop, and how it knows that the data ends."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync._errors import GradSyncError
from gradsync.functional._loop.first_call import meet_at_first_call
from gradsync.functional._loop.knowledge import LoopKnowledge
from gradsync.functional._loop.lockstep_of_forwards import hear_of_call, plan_calls
from gradsync.functional._window.exchange import Exchange, alike
from gradsync.functional._window.run import Run
from gradsync.functional._window.share import ASKS, Share, shares_in
from gradsync.functional._window.terms import ends_with_data
from gradsync.functional._window.window import Window
from gradsync.ranks.tables import Sent


class LoopExchange(Exchange):
    """The exchange of one run in a loop. A share always travels, and says how much data this rank has left."""

    has_an_end = True

    def __init__(self, run: Run, loop: LoopKnowledge) -> None:
        super().__init__(run.terms)
        self.always_sends = True
        self._run = run
        self._loop = loop
        self._num_changes = run.num_changes  # at its first call in this loop
        self._has_told_end = False  # whether the others know that this rank has closed its last window

    def begin(self) -> None:
        loop, run = self._loop, self._run
        if self._has_told_end:
            raise GradSyncError(
                f"The last item of {loop.name} must have as many calls as the items before it, one, but another came "
                "for it, when the first had closed the last window on all ranks. Make equally many calls for each "
                "item, or call after the loop."
            )
        loop.data.call(run)
        if run not in loop.called:
            meet_at_first_call(loop, run)

    def is_last_call(self, window: Window) -> bool:
        loop, run = self._loop, self._run
        if loop.is_in_lockstep:
            ends = not any(share.left for share in hear_of_call(loop, run, window.size))
        else:
            # With several runs, this rank cannot know whose window closes next: its last call closes none, and after
            # its data it asks the others. If all have equally many items, each closes its own.
            ends = not loop.data.left(run) and (loop.is_even or loop.only_run is not None)
        return ends and ends_with_data(run.terms.tail)

    def plan(self, window: Window) -> None:
        plan_calls(self._loop, self._run, window)

    def agree(self, window: Window) -> None:
        """Nothing to do: the ranks compared their settings when they met."""

    def share(self, window: Window | None) -> Share:
        """What this rank brings to the run's window, and what it says of its data."""
        share = Share(number=float(self._run.number)) if window is None else Share.of_window(window)
        return self._loop.with_data(self._run, share._replace(changes=float(self._run.num_changes - self._num_changes)))

    def send(self, window: Window) -> Sent | None:
        self._has_told_end = not self._loop.data.left(self._run)
        sent = window.team.tables.send(self.share(window).row())
        if len(self._loop.called) > 1:  # they are compared before gradients of different models meet
            self._loop.check_same(shares_in(sent))
        return sent

    def shares(self, window: Window, sent: Sent | None) -> list[Share]:
        if sent is None:
            return alike(window)
        loop = self._loop
        shares = shares_in(sent)
        loop.check_same(shares)
        if any(share.left == ASKS for share in shares):
            # A rank whose data has ended may have several windows open, and did not know which of them closes.
            shares = shares_in(loop.send(self.share(window)))
        loop.shares = shares
        return shares

    def due(self) -> Sequence[bool]:
        return [share.left >= 1 for share in self._loop.shares]  # not where there is only PERHAPS another call
