"""Waits of the host for its device, counted with their place. Usable in a rank of `run_on_device`; it imports no torch."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator

_NOTED: list[tuple[str, str]] = []
_PACKAGE = "/gradsync/"


@contextlib.contextmanager
def waits() -> Iterator[Counter[tuple[str, str]]]:
    """Count the waits inside, as (operation, place); the counter is filled as the block ends.

    The place is the innermost line of gradsync's, else of whoever is outside torch, else of torch itself.
    """
    found: Counter[tuple[str, str]] = Counter()
    start = len(_NOTED)
    try:
        yield found
    finally:
        found.update(_NOTED[start:])


def note(operation: str) -> None:
    """The host has waited, here."""
    _NOTED.append((operation, _place()))


def _place() -> str:
    stack = [frame for frame in reversed(traceback.extract_stack()) if "/tests/device/" not in frame.filename or "test_" in frame.filename]
    for frame in stack:
        if _PACKAGE in frame.filename:
            return f"gradsync: {frame.filename.rpartition(_PACKAGE)[2]}:{frame.lineno} {frame.line}"
    for frame in stack:
        if "/torch/" not in frame.filename and "/python3" not in frame.filename:
            return f"outside: {frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.line}"
    return f"torch: {stack[0].filename.rpartition('/torch/')[2]}:{stack[0].lineno}" if stack else "torch: a thread of its own"
