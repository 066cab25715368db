"""Where forwards wait for each other: who takes each micro-batch of a loop, and which is the last of its window.

With known lengths that is planned as a window opens. With others the ranks ask each other, one micro-batch ahead where
they can. Asked right before it, the host would wait until the device has come to the question, behind the backward
before it. So the question leaves a micro-batch early, before the forward that comes first: when it is read, the device
has all of that micro-batch still to do. A rank can speak of its next micro-batch if its loop has called once for each
item, and if it knows two items more than the one in hand.

What is said ahead is a promise, and may be broken: the loop's body passes over an item, or calls twice for one. Who has
promised a micro-batch and has none repeats its last. That nothing comes any more is taken on no promise: then the ranks
ask once more, and wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from gradsync.functional._place import Part, Place
from gradsync.functional._share import NOBODY, Share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gradsync.functional._data import Data
    from gradsync.functional._run import Run
    from gradsync.functional._talk import Talk
    from gradsync.functional._window import Window
    from gradsync.ranks.line import Sent


class Turn(NamedTuple):
    """A place that this rank takes in a window of the others, after its own data has ended."""

    run: Run
    place: Place


class _Asked(NamedTuple):
    """A question on the next micro-batch of `run`, with this rank's own answer; the others' come with it."""

    run: Run
    sent: Sent


class InStep:
    """The steps of one loop."""

    def __init__(self, data: Data, talk: Talk) -> None:
        self._data = data
        self._talk = talk
        self._planned: int | None = None  # calls in the open window, where the ranks need not ask
        self._asked: _Asked | None = None  # of the next call, where they do

    def plan(self, run: Run, window: Window) -> None:
        """A window opens."""
        talk, size, shares = self._talk, window.size, self._talk.shares
        lefts = [share.left for share in shares]
        self._planned = None
        if (
            talk.is_in_step
            and not callable(run.terms.steps)
            and len(talk.called) <= 1
            and len(talk.runs()) <= 1
            and not any(left % 1 for left in lefts)
        ):
            if max(lefts) >= size:
                self._planned = size
            elif max(lefts) and all(share.once or not share.left for share in shares) and run.terms.tail != "carry":
                self._planned = int(max(lefts))
        if self._planned is not None:
            self._asked = None

    def ends(self, run: Run, window: Window) -> bool:
        """Whether the call that has begun here is the last of all, or of its window as that was planned."""
        if self._planned is not None:
            return window.index + 1 >= self._planned
        shares = self._said_ahead(run)
        if not _is_enough(shares, closes=_closes(run, window.size)):
            left = 0.0 if self._data.is_in_last_call(run) else max(1.0, self._data.left(run))
            once = float(self._foresees(run))
            shares = self._talk.ask(Share(closing=float(run.key), left=left, size=float(window.size), once=once))
        self._ask_ahead(run, shares)
        return not any(share.left for share in shares)

    def next(self, stand_in: Callable[[Run, Part], Place]) -> Turn | None:
        """The next call of the other ranks, after this one's data has ended; `stand_in` gives its place."""
        talk, run = self._talk, self._talk.chief
        assert run is not None, "they have met"
        alone = len(talk.known) == 1
        if run.window is None and alone and any(share.left for share in talk.shares):
            stand_in(run, Part.REPEATS)  # opens it, and with that plans it
        if run.window is not None and self._planned is not None:
            return Turn(run, replace(stand_in(run, _part(run)), last=run.index + 1 >= self._planned))
        shares = self._said_ahead(run)
        comes = any(share.closing != NOBODY for share in shares)
        if not _is_enough(shares, closes=_closes(run, _size(run, shares, stand_in)) if comes else None):
            shares = talk.ask(Share(open=talk.first_open, once=float(alone)))
        called = talk.closing(shares)
        if called is None:
            for other in talk.known:
                if other.window is not None and not other.window.index:
                    other.discard()  # opened for a window that did not come
            return None
        if all(share.closing == NOBODY for share in shares):
            return Turn(called, replace(stand_in(called, Part.MISSES), last=True))
        size = _size(called, shares, stand_in)
        self._ask_ahead(called, shares)
        place = stand_in(called, _part(called))
        nobody_left = not any(share.left for share in shares) and called.terms.tail != "carry"
        return Turn(called, replace(place, last=place.index + 1 >= size or nobody_left))

    def _foresees(self, run: Run) -> bool:
        return self._data.foresees(run) and len(self._talk.known) <= 1

    def _promise(self, run: Run) -> Share:
        """What this rank says of its next call before it comes."""
        if self._data.has_ended:
            return Share(once=float(len(self._talk.known) <= 1))
        if not self._foresees(run):
            return Share()
        known = self._data.num_known
        return Share(closing=float(run.key), left=float(known > 1), once=1.0) if known > 0 else Share(once=1.0)

    def _ask_ahead(self, run: Run, shares: Sequence[Share]) -> None:
        """Where the ranks, who have said `shares` of this call, can speak of the next: ask now, and read it then."""
        can = all(share.once for share in shares) and any(share.left for share in shares)
        self._asked = _Asked(run, self._talk.question(self._promise(run))) if can else None

    def _said_ahead(self, run: Run) -> list[Share]:
        """What the ranks have said ahead of the call that comes now; nothing where they were not asked."""
        asked, self._asked = self._asked, None
        return self._talk.answers(asked.sent) if asked is not None and asked.run is run else []


def _is_enough(shares: Sequence[Share], *, closes: bool | None) -> bool:
    """Whether what was said ahead of a micro-batch is all that there is to know of it.

    `closes` tells whether it closes its window, whatever comes after it; None if that depends on whether more comes.
    """
    runs = all(share.once for share in shares) and any(share.closing != NOBODY for share in shares)
    return runs and (closes is not None or any(share.left for share in shares))


def _closes(run: Run, size: float) -> bool | None:
    """Whether the call that comes now closes its window, whatever comes after it; None if that depends on it."""
    if run.index + 1 >= size:
        return True
    return False if run.terms.tail == "carry" else None


def _size(run: Run, shares: Sequence[Share], stand_in: Callable[[Run, Part], Place]) -> float:
    """How many calls the window has that the ranks are in: as they say, or else as it is planned here."""
    return max(share.size for share in shares) or stand_in(run, Part.MISSES).size


def _part(run: Run) -> Part:
    return Part.REPEATS if run.fit().forward_communicates else Part.MISSES
