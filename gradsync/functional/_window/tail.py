"""What becomes of a tail: a window that no rank filled because the data ended."""

from __future__ import annotations

from typing import Literal, TypeAlias

from gradsync.functional._window.what_came import Closing

Tail: TypeAlias = Literal["step", "drop", "carry"]
"""An update with its exact mean; or it is discarded; or it stays open for the data that comes next."""


def ends_with_data(tail: Tail) -> bool:
    """Whether an open window closes when the data ends."""
    return tail != "carry"


def factor_of_update(tail: Tail, closing: Closing) -> float | None:
    """The factor for the gradients; None if there is nothing to average, or it is a tail that is dropped."""
    return closing.factor if tail != "drop" or closing.filled else None
