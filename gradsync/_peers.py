"""What a window knows of the other ranks, and where it agrees with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsync._guards import check_first, check_replays, check_sure, check_sync_batchnorm
from gradsync.functional._agreement import agree_on_kind, insist, meet, meet_with_data
from gradsync.functional._loss import SUM, kind_of
from gradsync.functional._lost import WaitingFor
from gradsync.functional._notice import Notice, opening

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from torch import nn

    from gradsync._feed import Feed
    from gradsync._settings import Settings
    from gradsync.functional._loss import LossSum
    from gradsync.functional._open_window import OpenWindow
    from gradsync.functional._tally import Row


class Peers:
    """The ranks of one `Accumulation`'s windows; on one rank, everything here is settled at once.

    `counts` are those of the `Accumulation`, whose number of closed windows is for messages and for comparison.
    """

    def __init__(self, name: str, settings: Settings, counts: Mapping[str, int]) -> None:
        self._name = name
        self._settings = settings
        self._counts = counts
        self._agreed = False
        self._forward_met = False
        self._sums = False  # whether the losses are sums, as agreed
        self._openings: list[dict[str, Any]] = []  # what the ranks said as the `.over` that runs began
        self._notice: Notice | None = None
        self._may_have_more: list[bool] = []  # by rank, in the `.over` that runs
        self._met: Feed | None = None  # the `.over` whose ranks have met
        self._last_source = 0  # the lowest rank with a micro-batch in the last window
        self._uneven = False  # whether ranks have differed in the `.over` that runs
        self.begun = False  # whether all ranks have begun the window that is open or comes next

    @property
    def any_more(self) -> bool:
        """Whether any rank may have a micro-batch in the coming window."""
        return any(self._may_have_more)

    @property
    def next_source(self) -> int:
        """The lowest rank that may have a micro-batch in the coming window."""
        return next((rank for rank, more in enumerate(self._may_have_more) if more), 0)

    def what(self) -> str:
        """What ranks wait for each other with, in words."""
        return f"synchronising the gradients of window {self._counts['window']} of {self._name}"

    def meet(
        self,
        window: OpenWindow,
        feed: Feed,
        models: Iterable[nn.Module],
        *,
        order: int,
        has_item: bool,
        is_open: bool,
        can_replay: bool,
    ) -> None:
        """Hear, at the first call or the end in an `.over`, which ranks have anything at all."""
        if self._met is feed:
            return
        words = {"number of closed windows": self._counts["window"], "place among its function's windows": order}
        said = meet_with_data(
            window.group,
            window.twins,
            f"the data of {self._name}.over",
            {
                **words,
                "more": has_item or is_open,
                "items": feed.num_items,
                "can replay": can_replay,
                "unsure": feed.unsure,
                **opening(
                    None if window.forward_communicates else window.group,
                    f"{self._name}.over",
                    held=window.num_micro_batches if is_open else 0,
                    left=feed.num_left if has_item else 0,
                ),
            },
        )
        insist([{key: one[key] for key in words} for one in said])
        if any(one["more"] for one in said):
            check_sure([one["unsure"] for one in said], self._name)
            if window.forward_communicates:
                check_replays([one["can replay"] for one in said], self._name)
        check_sync_batchnorm(models, [one["items"] for one in said], self._name)
        self._met = feed
        self._openings, self._notice = said, None
        self._may_have_more = [one["more"] for one in said]
        self._uneven = len(set(self._may_have_more)) > 1

    def first_forward(self, window: OpenWindow, *, runs: bool) -> None:
        """Where forwards communicate and may be dropped: hear, before the first, whether every rank runs it."""
        if not self._forward_met:
            self._forward_met = True
            said = meet(window.group, f"the first forward of {self._name}", {"runs": runs})
            check_first([one["runs"] for one in said], self._name)

    def in_step(self, window: OpenWindow, *, real: bool, more: bool) -> tuple[bool, bool]:
        """Whether nobody has more, and whether anybody runs one: where forwards communicate, on each micro-batch."""
        with WaitingFor(self.what):
            rows = window.step_together(more=more, called=real)
        return not any(row.more for row in rows), any(row.called for row in rows)

    def agree(self, window: OpenWindow, loss: torch.Tensor | LossSum | None) -> None:
        """Before the first synchronisation: nothing may differ that would make ranks wait for each other forever."""
        if self._agreed:
            return
        self._agreed = True
        settings = self._settings
        self._sums = (
            agree_on_kind(
                window.group,
                f"the first boundary of {self._name}",
                kind_of(loss),
                steps=window.size,
                tail=settings.tail,
                sync=settings.sync,
                nonfinite=settings.nonfinite,
                clip_norm=settings.clip_norm,
                skip=[kind.__name__ for kind in settings.skip],
            )
            == SUM
        )

    def notice(self, window: OpenWindow) -> Notice | None:
        """In the `.over` that runs, after `agree`: of windows that are not as planned on every rank."""
        if self._notice is None and window.num_ranks > 1:
            always = self._sums or window.forward_communicates or self._settings.skip or window.tells_size
            self._notice = Notice() if always else Notice(window.group, self._openings, f"{self._name}.over")
        return self._notice

    def agree_to_flush(self, window: OpenWindow, index: int) -> int | None:
        """The lowest rank that holds a micro-batch; None if no rank does. Raises if the ranks are not side by side."""
        words = {"number of closed windows at flush": self._counts["window"]}
        said = meet(window.group, f"flush of {self._name}", {**words, "open": index})
        insist([{key: one[key] for key in words} for one in said])
        return next((rank for rank, one in enumerate(said) if one["open"]), None)

    def begin(self, window: OpenWindow, size: int, source: int) -> None:
        """Begin a window of `size` with the buffers of rank `source`.

        Once a window, however often this rank discards and begins it again: it is collective.
        """
        if self.begun:
            return
        number = self._counts["window"]
        if callable(self._settings.steps) and window.forward_communicates:
            with WaitingFor(lambda: f"comparing the steps of window {number} of {self._name}"):
                window.agree_on_size(size)
        with WaitingFor(lambda: f"making the buffers equal for window {number} of {self._name}"):
            window.share_buffers(source)
        self.begun = True

    def note(self, rows: Sequence[Row]) -> None:
        """A window has closed with these."""
        self._uneven |= len({(row.num_micro_batches, row.filled, row.more) for row in rows}) > 1
        self._may_have_more = [row.more for row in rows]
        self._last_source = next((rank for rank, row in enumerate(rows) if row.num_micro_batches), 0)

    def end(self, window: OpenWindow) -> None:
        """The `.over` has ended on every rank: if they differed in it, make their buffers equal."""
        if self._uneven:
            with WaitingFor(lambda: f"making the buffers equal at the end of {self._name}.over"):
                window.share_buffers(self._last_source)
        self._uneven, self._notice = False, None
