"""Who draws from a loop, and how it was left, which a generator cannot know from the `GeneratorExit` that it gets."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dis import opname
from inspect import CO_GENERATOR
from types import CodeType, FrameType


def drawn_by(frame: FrameType | None) -> list[CodeType]:
    """What draws the items that are yielded to this frame: generators around them (tqdm), and the loop."""
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back if frame.f_code.co_flags & CO_GENERATOR else None
    return codes


def driver_of(frame: FrameType | None) -> tuple[int, CodeType] | None:
    """The function call that draws the items that are yielded to this frame: its frame's id, and its code."""
    while frame is not None and frame.f_code.co_flags & CO_GENERATOR:
        frame = frame.f_back
    return None if frame is None else (id(frame), frame.f_code)


def is_running(driver: tuple[int, CodeType] | None) -> bool:
    """Whether that call has not returned, in this thread. A loop in it that was left may still be referenced."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (id(frame), frame.f_code) != driver:
        frame = frame.f_back
    return frame is not None


def is_left_on_purpose(frame: FrameType | None, loop: Collection[CodeType]) -> bool:
    """Whether a loop was left by break or return, and not by an exception, where `frame` closes its generator.

    `loop` is what `drawn_by` gave; a frame that is not in it goes on after the loop's function has returned. Only a
    frame's current instruction tells whether an exception is passing: those listed below drop the generator, and cannot
    raise. A generator around the loop's is at its `yield`, and is closed by its own loop.
    """
    while frame is not None and frame.f_code in loop:
        instruction = opname[frame.f_code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else "RETURN"
        if not frame.f_code.co_flags & CO_GENERATOR or not instruction.startswith(("YIELD", "RESUME", "SEND")):
            return instruction.startswith(_DROPS)
        frame = frame.f_back
    return True


# How the instructions begin by which a frame drops an object, in CPython 3.10 to 3.14. Others with POP_, STORE_ and
# DELETE_ ask an object, and may raise: POP_JUMP_IF_TRUE, STORE_SUBSCR. FOR_ITER is where the other iterable of a `zip`
# has ended, or has raised, which this does not tell apart.
_NAMED = [f"{verb}_{where}" for verb in ("STORE", "DELETE") for where in ("FAST", "NAME", "GLOBAL", "DEREF")]
_DROPS = ("POP_TOP", "POP_ITER", "FOR_ITER", "END_FOR", "RETURN", *_NAMED)
