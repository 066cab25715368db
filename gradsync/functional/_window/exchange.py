"""`Exchange`: how the ranks tell each other their shares of a window, and what they compare before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradsync._errors import GradSyncError
from gradsync._loss import IN_WORDS, PLAIN, SUMS
from gradsync.functional._window.share import Share, insist_on_one_size, shares_in
from gradsync.functional._window.window import Window
from gradsync.ranks.lost import WaitingFor
from gradsync.ranks.meet import agreed, insist, meet
from gradsync.ranks.tables import Sent


class Exchange:
    """How the ranks tell each other their shares of the window of a run that closes.

    This is the exchange outside of loops, where all ranks make equally many calls. A table is sent only where shares
    may differ all the same: with `skip`, with counts, with a function for `steps`, in a window that a loop left open.
    In `.over` and in `sync_every` over an iterable, the `Loop` takes its place.
    """

    #: Whether this is a loop, whose data ends.
    has_an_end = False

    def begin(self, run: Any) -> None:
        """Called when a call begins, before it opens a window."""

    def is_last_call(self, run: Any) -> bool:  # noqa: ARG002 - for loops
        """Whether the call that begins is the last of this rank's data, and closes its window."""
        return False

    def plan(self, run: Any) -> None:
        """A window opens. If the ranks' forwards wait for each other, send its size: another size would hang them.

        `compare_sizes` reads the answer before the window's first backward.
        """
        window: Window = run.open_window
        if window.team.lockstep and (window.team.is_new or callable(run.terms.steps)):
            window.sizes = window.team.tables.send([float(window.size)])

    def send(self, run: Any) -> Sent | None:
        """Send this rank's share, without waiting; None where no table is needed.

        Raises if this rank ran another number of backwards than the window's size, on which the other ranks count.
        """
        self.agree(run)
        window: Window = run.open_window
        # Without lockstep, each rank's window has only its own micro-batches, and is full.
        if run.always_sends or window.kind == SUMS or (window.left_by_loop and window.team.lockstep):
            return window.team.tables.send(Share.of_window(window).row())
        if window.kind != PLAIN and window.num_micro_batches != window.size:
            raise GradSyncError(
                f"Each rank must run {window.size} backwards in a window of {window.team.name}, because a loop without "
                f"an iterable cannot tell the others where its data ends, but there were {window.num_micro_batches} in "
                "this one. Run a backward in each micro-batch, or give it the iterable: then ranks may differ."
            )
        return None

    def hear(self, run: Any, sent: Sent) -> list[Share]:  # noqa: ARG002 - for loops
        """The shares of all ranks. Waits for the table, and for no backward."""
        return shares_in(sent)

    def due(self, run: Any) -> Sequence[bool]:
        """For each rank, whether a micro-batch of it is expected in the window that closes: not in a `flush`."""
        window: Window = run.open_window
        return [window.heard is None] * window.team.num_ranks

    def agree(self, run: Any) -> None:
        """Before a team's first synchronisation, and when its kind of loss changes: compare what could hang ranks."""
        window: Window = run.open_window
        team = window.team
        if team.kind is not None and (run.always_sends or window.kind == team.kind):
            return
        words = run.terms.in_words(window.number)
        scaler = "none" if window.scale is None else f"one of scale {float(window.scale.value)}"  # waits, once
        mine = {**words, "loss": window.kind, "scaler": scaler}
        said = meet(team.group, f"the first boundary of {team.name}", mine)
        insist(said, words)
        with_loss = [(rank, one) for rank, one in enumerate(said) if one["loss"]]
        agreed([(rank, IN_WORDS[one["loss"]]) for rank, one in with_loss], "kind of loss")
        agreed([(rank, one["scaler"]) for rank, one in with_loss], "GradScaler")
        team.kind = max(one["loss"] for one in said) or None


OUTSIDE = Exchange()


def compare_sizes(window: Window) -> None:
    """Before a window's first backward, raise if the ranks' windows differ in length.

    The ranks were asked as it opened. The answer is read now, when the device has a forward to be busy with.
    """
    sizes, window.sizes = window.sizes, None
    assert sizes is not None, "asked before"
    with WaitingFor(lambda: f"comparing the steps of window {window.number} of {window.team.name}"):
        rows = sizes.rows()
    insist_on_one_size([Share(size=row[0]) for row in rows])


def alike(window: Window) -> list[Share]:
    """The shares of all ranks where each brings the same as this rank. Waits for its count on a device."""
    share = Share.of_window(window)
    if window.scale is not None:
        share = share._replace(scale=0.0)  # not read, because that would wait for the device
    if window.kind == SUMS:
        share = share._replace(count=float(share.count))
    return [share] * window.team.num_ranks
