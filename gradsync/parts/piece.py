"""A piece of a call's work: some of its rows, and the parameters that lack their gradient of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gradsync.parts.cut import Arguments
    from gradsync.parts.fit import Fit

_SMALLEST = 2.0**-16  # a share of a call: below it, the user's cutting function is assumed to make no progress


@dataclass
class Piece:
    """Some rows of a call; the first piece has all of them."""

    arguments: Arguments
    rows: int | None = None
    size: float = 1.0  # its number of rows; a share of the call if rows are not known
    share: float | None = 1.0  # of the call's rows; None if they are not known
    left: list[torch.Tensor] | None = None  # the parameters that lack its gradient; None: all

    def cut(self, parts: int, fit: Fit) -> list[Piece]:
        """This piece in parts; empty if it cannot be cut."""
        if self.size < _SMALLEST:
            return []
        arguments = fit.cut(*self.arguments, parts)
        if len(arguments) < 2:
            return []
        rows = [fit.rows(*some) for some in arguments]
        known = [number for number in rows if number is not None]
        if self.rows is None or self.share is None or len(known) < len(rows) or sum(known) != self.rows:
            size = self.size / len(arguments)
            return [Piece(some, None, size, None, self._still_left()) for some in arguments]
        return [
            Piece(some, number, number, self.share * number / self.rows, self._still_left())
            for some, number in zip(arguments, known, strict=True)
        ]

    def _still_left(self) -> list[torch.Tensor] | None:
        return None if self.left is None else list(self.left)
