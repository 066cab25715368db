"""One question ahead: what ranks that take each micro-batch together say of the next one, while this one runs.

Where forwards wait for each other, a rank must know before each micro-batch who runs it and whether it is the last of
all. Asked right before it, the host waits until the device has come to the question, behind the backward before it. So
the question leaves a micro-batch early, before the forward that comes first: when it is read, the device has all of
that micro-batch still to do. A rank can speak of its next micro-batch if its loop has called once for each item, and if
it knows two items more than the one in hand.

What is said ahead is a promise, and may be broken: the loop's body passes over an item, or calls twice for one. Who has
promised a micro-batch and has none repeats its last. That nothing comes any more is taken on no promise: then the ranks
ask once more, and wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradsync.functional._share import NOBODY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradsync.functional._run import Run
    from gradsync.functional._share import Share
    from gradsync.ranks.line import Sent


class Asked(NamedTuple):
    """A question on the next micro-batch of `run`, with this rank's own answer; the others' come with it."""

    run: Run
    sent: Sent


def can_be_foreseen(shares: Sequence[Share]) -> bool:
    """Whether the ranks, who have said this of a micro-batch, can speak of the next one before it comes."""
    return all(share.once for share in shares) and any(share.left for share in shares)


def is_enough(shares: Sequence[Share], *, closes: bool | None) -> bool:
    """Whether what was said ahead of a micro-batch is all that there is to know of it.

    `closes` tells whether it closes its window, whatever comes after it; None if that depends on whether more comes.
    """
    runs = all(share.once for share in shares) and any(share.closing != NOBODY for share in shares)
    return runs and (closes is not None or any(share.left for share in shares))
