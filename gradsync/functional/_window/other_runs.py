"""Other runs that use the same parameters: they must have no open window, and what they sent must have arrived."""

from __future__ import annotations

from collections.abc import Collection

from gradsync._errors import GradSyncError
from gradsync._state import OPEN, TRAVELLING


def insist_on_one_window(name: str, ids: Collection[int], *, of: object) -> None:
    """Raise if one of these parameters, with which the run `of` opens a window, is in the open window of another."""
    for other in list(OPEN) if OPEN else ():
        if other is not of and not other.team.ids.isdisjoint(ids):
            raise GradSyncError(
                f"A parameter can be in one open window at a time, but {name} begins one with parameters that "
                f"are in the open window of {other.name}. Call {other.name}.flush() or .reset() first, or keep the "
                "other model out of one of the optimizers."
            )


def land(ids: Collection[int], *, of: object = None, beside: object = None) -> None:
    """Settle the windows of other runs whose gradients travel to these parameters.

    The windows of the run `of` are settled whatever their parameters; those of the run `beside` are not.
    """
    for other in list(TRAVELLING) if TRAVELLING else ():
        if other.run is of or (other.run is not beside and not other.ids.isdisjoint(ids)):
            other.settle()
