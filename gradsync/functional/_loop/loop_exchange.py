"""`LoopExchange`: what a rank tells the others of a window in a loop, and how it knows that the data ends."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync._errors import GradSyncError
from gradsync.functional._loop.lockstep_of_forwards import hear, plan
from gradsync.functional._loop.meeting import begin
from gradsync.functional._loop.talk import Talk
from gradsync.functional._window.driver import Run
from gradsync.functional._window.exchange import Exchange, alike
from gradsync.functional._window.steps_and_tail import ends_with_data
from gradsync.functional._window.table import ASKS, Share
from gradsync.functional._window.window import Window
from gradsync.ranks.line import Sent


class LoopExchange(Exchange):
    """The exchange of one run in a loop. A share always travels, and says how much data this rank has left."""

    has_an_end = True

    def __init__(self, run: Run, talk: Talk) -> None:
        super().__init__(run.terms)
        self._run = run
        self._talk = talk
        self._num_changes = run.num_changes  # at its first call in this loop
        self._has_told_end = False  # whether the others know that this rank has closed its last window

    def enter(self, run: Run) -> bool:
        talk, data = self._talk, self._talk.data
        if self._has_told_end:
            raise GradSyncError(
                f"Each item of {talk.name} has had one call, and so the call for the last item has closed the last "
                "window, on all ranks; but one more call came for it. Make as many calls for each item, or call after "
                "the loop."
            )
        data.call(run)
        if run not in talk.called:
            begin(talk, run)
        super().enter(run)
        if talk.is_in_lockstep:
            assert run.window is not None, "opened by now"
            ends = not any(share.left for share in hear(talk, run, run.window.size))
        else:
            # With several runs, this rank cannot know whose window closes next: its last call closes none, and
            # after its data it asks the others. If all have as many items, each closes its own.
            ends = not data.left(run) and (talk.is_even or talk.alone is not None)
        return ends and ends_with_data(run.terms.tail)

    def plan(self, window: Window) -> None:
        plan(self._talk, self._run, window)

    def agree(self, window: Window) -> None:
        """Nothing to do: the ranks compared their settings when they met."""

    def share(self, window: Window | None) -> Share:
        """What this rank brings to the run's window, and what it says of its data."""
        share = Share(number=float(self._run.number)) if window is None else window.share()
        return self._talk.about(self._run, share._replace(changes=float(self._run.num_changes - self._num_changes)))

    def send(self, window: Window) -> Sent | None:
        self._has_told_end = not self._talk.data.left(self._run)
        return window.team.line.send(self.share(window).row())

    def shares(self, window: Window, sent: Sent | None) -> list[Share]:
        if sent is None:
            return alike(window)
        talk = self._talk
        shares = [Share.of(row) for row in sent.rows()]
        talk.check_same(shares)
        if any(share.left == ASKS for share in shares):
            # A rank whose data has ended may have several windows open, and did not know which of them closes.
            shares = [Share.of(row) for row in talk.send(self.share(window)).rows()]
        talk.shares = shares
        return shares

    @property
    def due(self) -> Sequence[bool]:  # type: ignore[override] # read only
        return [share.left > 0 for share in self._talk.shares]
