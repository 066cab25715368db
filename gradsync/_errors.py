"""The one exception of the package."""

from __future__ import annotations


class GradSyncError(RuntimeError):
    """Misuse found while running: its text says what was needed, what came, and what to do.

    Wrong arguments are `TypeError` and `ValueError`, as everywhere in Python; this one is for what only shows while a
    loop runs.
    """
