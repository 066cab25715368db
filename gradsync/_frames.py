"""How a loop was left, which a generator cannot know from the `GeneratorExit` that it gets."""

from __future__ import annotations

from dis import opname
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


def is_left_on_purpose(frame: FrameType | None, *more: str) -> bool:
    """Whether the loop in this frame was left by break or return, and not by an exception.

    An exception that propagates shows only in the frame's current instruction: those listed here, and those that begin
    with one of `more`, do not raise.
    """
    if frame is None:
        return True
    instruction = opname[frame.f_code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else "RETURN"
    return instruction.startswith(("POP", "END", "SWAP", "RETURN", "DELETE", "STORE", *more))
