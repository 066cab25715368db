"""For engines whose forward communicates: which ranks run each micro-batch of a loop, and which is a window's last.

Where lengths are known, that is planned when a window opens. Where not, the ranks ask each other (a table), one
micro-batch ahead if they can: the answer to a question is queued on the device behind the backward that runs. So the
question about micro-batch k + 1 is sent before the forward of k. When the host reads the answer, the device still has k
to do. A rank can answer for its next micro-batch if its loop has made one call for each item so far, and if it has
drawn two items beyond the current one.

An answer given ahead is a promise, and may be broken: the loop's body may pass over an item, or call twice for it. If a
promised micro-batch does not come, that rank repeats its last. "I have no more" is never trusted ahead: the ranks ask
again, and wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradsync.functional._loop.items import Data
from gradsync.functional._loop.talk import Talk
from gradsync.functional._window.driver import Run
from gradsync.functional._window.steps_and_tail import ends_with_data
from gradsync.functional._window.table import NOBODY, PERHAPS, UNKNOWN, Share
from gradsync.functional._window.window import Place, Role, Window
from gradsync.ranks.line import Sent


class StandIn(NamedTuple):
    """A place that this rank takes in a window of the others, after its own data has ended."""

    run: Run
    place: Place


class _Asked(NamedTuple):
    """A question about the next micro-batch of `run`: `sent` brings the answers of all ranks."""

    run: Run
    sent: Sent


class Lockstep:
    """Plans the micro-batches of one loop with the other ranks."""

    def __init__(self, data: Data, talk: Talk) -> None:
        self._data = data
        self._talk = talk
        self._planned: int | None = None  # calls in the open window; None where the ranks must ask
        self._planned_by: Sequence[Share] = ()  # what the ranks had said then
        self._asked: _Asked | None = None  # about the next call, where it was asked

    def plan(self, run: Run, window: Window) -> None:
        """Called when a window opens."""
        talk, shares = self._talk, self._talk.shares
        self._planned = None
        if not talk.is_in_lockstep or callable(run.terms.steps) or len(talk.called) > 1 or len(talk.runs()) > 1:
            return
        lefts = [share.left for share in shares]
        is_out_of_date = shares is self._planned_by  # the window that they were for was discarded
        if is_out_of_date or PERHAPS in lefts or UNKNOWN in lefts:
            return
        if max(lefts) >= window.size:
            self._planned = window.size
        elif max(lefts) and all(share.once or not share.left for share in shares) and ends_with_data(run.terms.tail):
            self._planned = int(max(lefts))
        if self._planned is not None:
            self._asked, self._planned_by = None, shares

    def ends(self, run: Run, window: Window) -> bool:
        """Whether the call that has begun is the last of all ranks', or the last of its planned window."""
        if self._planned is not None:
            return window.index + 1 >= self._planned
        shares = self._said_ahead(run)
        if _opens(run) or not _is_enough(shares, closes=_closes(run, window.size)):
            left = self._data.left(run)
            left = max(1.0, left) if left else 0.0
            once = float(self._foresees(run))
            shares = self._talk.ask(Share(closing=float(run.key), left=left, size=float(window.size), once=once))
        self._ask_ahead(run, shares)
        return not any(share.left for share in shares)

    def next(self, stand_in: Callable[[Run, Role], Place]) -> StandIn | None:
        """The next call of the other ranks, after this rank's data has ended; `stand_in` gives its place."""
        talk, run = self._talk, self._talk.chief
        assert run is not None, "they have met"
        alone = len(talk.known) == 1
        size = 0.0
        if alone and any(share.left for share in talk.shares):
            size = float(stand_in(run, Role.REPEATS).size)  # opens the window if none is, which plans it
        if run.window is not None and self._planned is not None:
            return StandIn(run, stand_in(run, _role(run))._replace(last=run.index + 1 >= self._planned))
        shares = self._said_ahead(run)
        comes = any(share.closing != NOBODY for share in shares)
        enough = _is_enough(shares, closes=_closes(run, _size(run, shares, stand_in)) if comes else None)
        if _opens(run) or not enough:
            shares = talk.ask(Share(open=talk.first_open, size=size, once=float(alone)))
        called = talk.closing(shares)
        if called is None:
            self._discard_empty()
            return None
        if all(share.closing == NOBODY for share in shares):  # nobody runs it: a window that was left open closes
            return StandIn(called, stand_in(called, Role.MISSES)._replace(last=True))
        size = _size(called, shares, stand_in)
        self._ask_ahead(called, shares)
        place = stand_in(called, _role(called))
        nobody_left = not any(share.left for share in shares) and ends_with_data(called.terms.tail)
        return StandIn(called, place._replace(last=place.index + 1 >= size or nobody_left))

    def _discard_empty(self) -> None:
        """Discard what was opened for a window that did not come."""
        for run in self._talk.known:
            if run.window is not None and not run.window.index:
                run.discard()

    def _foresees(self, run: Run) -> bool:
        """Whether each item has had one call, of this run: then calls to come are known as far as the items are."""
        return self._data.calls_once(run) and not self._data.num_idle and len(self._talk.known) <= 1

    def _promise(self, run: Run) -> Share:
        """What this rank can say of its next call before that begins."""
        if self._data.has_ended:
            return Share(once=float(len(self._talk.known) <= 1))
        if not self._foresees(run):
            return Share()
        known = self._data.num_known
        return Share(closing=float(run.key), left=float(known > 1), once=1.0) if known > 0 else Share(once=1.0)

    def _ask_ahead(self, run: Run, shares: Sequence[Share]) -> None:
        """Ask about the next call now, and read it then, if by `shares`, of this call, all ranks can answer."""
        can = all(share.once for share in shares) and any(share.left for share in shares)
        self._asked = _Asked(run, self._talk.question(self._promise(run))) if can else None

    def _said_ahead(self, run: Run) -> list[Share]:
        """What the ranks have said ahead of the call that begins now; nothing if they were not asked."""
        asked, self._asked = self._asked, None
        return self._talk.answers(asked.sent) if asked is not None and asked.run is run else []


def _opens(run: Run) -> bool:
    """Whether a window begins whose size other ranks may see otherwise: then all ranks tell it before they run."""
    return callable(run.terms.steps) and not run.index


def _is_enough(shares: Sequence[Share], *, closes: bool | None) -> bool:
    """Whether what was said ahead of a micro-batch is enough to run it.

    `closes` is whether it closes its window; None if it does so only where no rank has more.
    """
    runs = all(share.once for share in shares) and any(share.closing != NOBODY for share in shares)
    return runs and (closes is not None or any(share.left for share in shares))


def _closes(run: Run, size: float) -> bool | None:
    """Whether the call that begins now closes its window; None if it does so only where no rank has more."""
    if run.index + 1 >= size:
        return True
    return None if ends_with_data(run.terms.tail) else False


def _size(run: Run, shares: Sequence[Share], stand_in: Callable[[Run, Role], Place]) -> float:
    """How many calls the current window has: as the ranks say, or else as planned here."""
    return max(share.size for share in shares) or stand_in(run, Role.MISSES).size


def _role(run: Run) -> Role:
    return Role.REPEATS if run.fitting_team().forward_communicates else Role.MISSES
