"""For engines whose forward communicates: which ranks run each micro-batch of a loop, and which is a window's last.

Where lengths are known, that is planned when a window opens. Where not, the ranks ask each other (a table), one
micro-batch ahead if they can: the answer to a question is queued on the device behind the backward that runs. So the
question about micro-batch k + 1 is sent before the forward of k. When the host reads the answer, the device still has k
to do. A rank can answer for its next micro-batch if its loop has made one call for each item so far. Where the length
is not known, the loop draws two items ahead: an answer also says whether the next item is the last.

An answer given ahead is a promise, and may be broken: the loop's body may pass over an item, or call twice for it. If a
promised micro-batch does not come, that rank repeats its last. "I have no more" is never trusted ahead: the ranks ask
again, and wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.functional._loop.knowledge import LoopKnowledge
from gradsync.functional._window.run import Run
from gradsync.functional._window.share import NOBODY, PERHAPS, UNKNOWN, Share
from gradsync.functional._window.terms import ends_with_data


def plan_calls(loop: LoopKnowledge, run: Run) -> None:
    """A window opens: plan how many calls it has, where all ranks know that."""
    loop.planned = None
    # A plan is kept to also where fewer items come than a length says: but a window that is carried on stays open then.
    is_carried = not ends_with_data(run.terms.tail)
    if not loop.is_in_lockstep or callable(run.terms.steps) or loop.only_run is None or is_carried:
        return
    shares = loop.shares
    lefts = [share.left for share in shares]
    if PERHAPS in lefts or UNKNOWN in lefts:
        return
    size = run.open_window.size
    most = min(max(lefts), size)
    if most == size or (most and all(share.once or not share.left for share in shares)):
        loop.planned, loop.asked = int(most), None
        # If this window is discarded, nobody knows how many items the others still have.
        loop.shares = [share._replace(left=UNKNOWN if share.left else 0.0) for share in shares]


def hear_of_call(loop: LoopKnowledge, run: Run, size: float) -> Sequence[Share]:
    """What ranks say of the call that begins now: whose it is, and who has more behind it.

    `size` is that of the call's window; a rank that does not know which window it is passes 0.
    """
    if loop.planned is not None and run.window is not None:
        return [Share(run_key=float(run.key), left=float(loop.planned - run.index - 1))]
    asked, loop.asked = loop.asked, None
    shares = loop.answers(asked[1]) if asked is not None and asked[0] is run else []
    if not _is_enough(run, shares):
        shares = loop.ask(loop.with_data(run, Share(size=size)))
    if all(share.once for share in shares) and any(share.left for share in shares):  # all can answer ahead
        loop.asked = run, loop.question(_promise(loop, run))
    return shares


def _promise(loop: LoopKnowledge, run: Run) -> Share:
    """What this rank can say of its next call before that begins."""
    once = loop.foresees(run)
    known = loop.data.num_known if once else 0
    return Share(run_key=float(run.key) if known else NOBODY, left=float(known > 1), once=float(once))


def _is_enough(run: Run, shares: Sequence[Share]) -> bool:
    """Whether what was said ahead of a micro-batch is enough to run it, and to know whether it is the window's last."""
    window = run.window
    if window is None or (callable(run.terms.steps) and not window.index):
        return False  # other ranks may see another size: all tell it before they run
    comes = all(share.once for share in shares) and any(share.run_key != NOBODY for share in shares)
    is_full, is_carried = window.index + 1 >= window.size, not ends_with_data(run.terms.tail)
    if is_full and is_carried:
        return False  # if nobody keeps the promise, the window stays open
    return comes and (is_full or is_carried or any(share.left for share in shares))
