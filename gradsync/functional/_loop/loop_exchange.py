"""`LoopExchange`: what a rank tells the others of a window in a loop, and how it knows that the data ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradsync._errors import GradSyncError
from gradsync.functional._loop.items import Data
from gradsync.functional._loop.lockstep_of_forwards import Lockstep
from gradsync.functional._loop.talk import Talk
from gradsync.functional._window.driver import Run
from gradsync.functional._window.exchange import Exchange, alike
from gradsync.functional._window.steps_and_tail import ends_with_data
from gradsync.functional._window.table import ASKS, NOBODY, Share
from gradsync.functional._window.window import Window
from gradsync.ranks.line import Sent


class LoopExchange(Exchange):
    """The exchange of one run in a loop. A share always travels, and says how much data this rank has left."""

    has_an_end = True

    def __init__(self, run: Run, data: Data, talk: Talk, lockstep: Lockstep, meet: Callable[[Run], None]) -> None:
        """`meet` is called at the run's first call in the loop."""
        super().__init__(run.terms)
        self._run = run
        self._data = data
        self._talk = talk
        self._lockstep = lockstep
        self._meet = meet
        self._num_changes = run.num_changes  # at its first call in this loop
        self._has_told_end = False  # whether the others know that this rank has closed its last window

    @property
    def changes(self) -> float:
        """How often the run's calls came with other participants, since the first in this loop."""
        return float(self._run.num_changes - self._num_changes)

    def enter(self, run: Run) -> bool:
        talk, data = self._talk, self._data
        if self._has_told_end:
            raise GradSyncError(
                f"Each item of {talk.name} has had one call, and so the call for the last item has closed the last "
                "window, on all ranks; but one more call came for it. Make as many calls for each item, or call after "
                "the loop."
            )
        data.call(run)
        if run not in talk.called:
            self._meet(run)
        window = run.window
        if window is None:
            window = run.open(run.fitting_team())
            self.plan(window)
        if talk.is_in_lockstep:
            ends = self._lockstep.ends(run, window)
        else:
            # With several runs, this rank cannot know whose window closes next: its last call closes none, and
            # after its data it asks the others.
            ends = not data.left(run) and (data.is_as_long or len(talk.known) <= 1)
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
        if any(share.left == ASKS for share in shares):
            # A rank whose data has ended may have several windows open, and did not know which of them closes.
            shares = [Share.of(row) for row in talk.send(self._share(window)).rows()]
        talk.shares = shares
        return shares

    @property
    def due(self) -> Sequence[bool]:  # type: ignore[override] # read only
        return [share.left > 0 for share in self._talk.shares]

    def _share(self, window: Window) -> Share:
        run, data = self._run, self._data
        once, left = float(data.calls_once(run)), data.left(run)
        self._has_told_end = left == 0
        closing, opened = (NOBODY, self._talk.first_open) if data.has_ended else (float(run.key), NOBODY)
        return window.share()._replace(closing=closing, open=opened, left=left, once=once, changes=self.changes)
