"""Shows progress on standard error: one changing line on a terminal, plain lines elsewhere."""

import sys
import time
from typing import TextIO

QUIET_SECONDS = 5.0
"""Plain lines stay in a log, so they come no faster than this."""


class Progress:
    """Call it with a text; close it before other output."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._told = -QUIET_SECONDS
        self._width = 0

    def __call__(self, text: str) -> None:
        """Show it."""
        if self._terminal:
            print(f"\r{text:<{self._width}}", end="", file=self._stream, flush=True)
            self._width = len(text)
        elif time.monotonic() - self._told >= QUIET_SECONDS:
            print(text, file=self._stream, flush=True)
            self._told = time.monotonic()

    def close(self) -> None:
        """Leave a clean line."""
        if self._terminal and self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=self._stream, flush=True)
            self._width = 0
