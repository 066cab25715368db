"""References to the user's objects that do not keep them alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def reference(one: Any) -> Callable[[], Any]:
    """A function that returns the object, and does not keep it alive if it can be referenced weakly."""
    if one is None:
        return lambda: None
    try:
        return weakref.ref(one)
    except TypeError:
        return lambda: one  # it has __slots__
