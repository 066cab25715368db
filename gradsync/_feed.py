"""What is known of the data while `.over` runs: whether the current item is the last."""

from __future__ import annotations

import itertools

_TURNS = itertools.count()


class Feed:
    """One running `.over`, as the calls in its loop see it."""

    __slots__ = ("_calls", "_most_calls", "_num_before", "fed", "last", "num_items", "turn", "unsure")

    def __init__(self, num_items: int | None, fed: dict[int, bool]) -> None:
        self.num_items = num_items  # None where that is not known before the end
        # Whose calls the loop has made so far, those of the `.over`s nested with this one too, by id; and whether their
        # forward communicates.
        self.fed = fed
        self.unsure = False  # whether it ended without a call, and which ones other ranks make is not known
        self.last = False
        self.turn = next(_TURNS)  # of its function's first call among all; before that, of its own beginning
        self._num_before = -1  # items that were handed out before the current one
        self._calls = 0
        self._most_calls = 0

    def next_item(self, *, last: bool) -> None:
        """An item is handed out."""
        self.last = last
        self._num_before += 1
        self._calls = 0

    def called(self) -> tuple[bool, bool]:
        """The function is called, for the current item.

        Whether it is the last call, in a loop that is known to call once an item; and whether one may come after it.
        """
        if self._most_calls == 0:
            self.turn = next(_TURNS)
        once = self.last and self._most_calls == 1
        ending = once and self._calls == 0
        self._calls += 1
        self._most_calls = max(self._most_calls, self._calls)
        return ending, not once

    @property
    def in_step(self) -> bool:
        """Whether ranks take each item together, for a forward that communicates: then all of the loop's windows do."""
        return any(self.fed.values())

    @property
    def num_left(self) -> int | None:
        """How many items there should be from the current one on, where that is known."""
        return None if self.num_items is None else max(0, self.num_items - self._num_before)
