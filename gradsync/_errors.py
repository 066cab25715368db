"""The exception for misuse."""

from __future__ import annotations

import builtins


class GradSyncError(RuntimeError):
    """Misuse found while running: its text says what was needed, what came, and what to do.

    Wrong arguments are `TypeError` and `ValueError`, as everywhere in Python; this one is for what only shows while a
    loop runs.
    """


def is_misuse(error: BaseException) -> bool:
    """Whether an error is a `GradSyncError`, or a group with one in it. No `skip` drops these."""
    inner = getattr(error, "exceptions", ()) if isinstance(error, _GROUPS) else ()
    return isinstance(error, GradSyncError) or any(map(is_misuse, inner))


_GROUPS = getattr(builtins, "BaseExceptionGroup", ())  # of Python 3.11
