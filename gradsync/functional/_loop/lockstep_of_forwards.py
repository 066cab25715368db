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

from collections.abc import Sequence

from gradsync.functional._loop.talk import Talk
from gradsync.functional._window.driver import Run
from gradsync.functional._window.steps_and_tail import ends_with_data
from gradsync.functional._window.table import NOBODY, PERHAPS, UNKNOWN, Share
from gradsync.functional._window.window import Window
from gradsync.ranks.line import Sent


class Lockstep:
    """Plans the micro-batches of one loop with the other ranks."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._planned: int | None = None  # calls in the open window; None where the ranks must ask
        self._planned_by: Sequence[Share] = ()  # what the ranks had said then
        self._asked: tuple[Run, Sent] | None = None  # the run whose next call was asked about, and the answers

    def plan(self, run: Run, window: Window) -> None:
        """Called when a window opens."""
        self._planned, shares = None, self._talk.shares
        if not self._talk.is_in_lockstep or callable(run.terms.steps) or self._talk.alone is None:
            return
        lefts = [share.left for share in shares]
        is_out_of_date = shares is self._planned_by  # the window that they were for was discarded
        if is_out_of_date or PERHAPS in lefts or UNKNOWN in lefts:
            return
        most = min(max(lefts), window.size)
        can_end = ends_with_data(run.terms.tail) and all(share.once or not share.left for share in shares)
        if most == window.size or (most and can_end):
            self._planned, self._planned_by, self._asked = int(most), shares, None

    def hear(self, run: Run, size: float) -> Sequence[Share]:
        """What ranks say of the call that begins now: whose it is, and who has more behind it.

        `size` is that of its window, 0 on a rank that does not know whose window that is.
        """
        talk = self._talk
        if self._planned is not None and run.window is not None:
            return [Share(closing=float(run.key), left=float(self._planned - run.index - 1))]
        asked, self._asked = self._asked, None
        shares = talk.answers(asked[1]) if asked is not None and asked[0] is run else []
        if not _is_enough(run, shares):
            shares = talk.ask(talk.about(run, Share(size=size)))
        if all(share.once for share in shares) and any(share.left for share in shares):  # all can answer ahead
            self._asked = run, talk.question(self._promise(run))
        return shares

    def _promise(self, run: Run) -> Share:
        """What this rank can say of its next call before that begins."""
        known = self._talk.data.num_known
        if not self._talk.foresees(run):
            return Share()
        return Share(closing=float(run.key), left=float(known > 1), once=1.0) if known else Share(once=1.0)


def _is_enough(run: Run, shares: Sequence[Share]) -> bool:
    """Whether what was said ahead of a micro-batch is enough to run it, and to know whether it is the window's last."""
    window = run.window
    if window is None or (callable(run.terms.steps) and not window.index):
        return False  # other ranks may see another size: all tell it before they run
    comes = all(share.once for share in shares) and any(share.closing != NOBODY for share in shares)
    closes = window.index + 1 >= window.size or not ends_with_data(run.terms.tail)
    return comes and (closes or any(share.left for share in shares))
