"""A rank that is gone or out of reach: how torch tells of it, and how we say what was waited for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch.distributed as dist

from gradsync._errors import GradSyncError

if TYPE_CHECKING:
    from collections.abc import Callable

# gloo raises plain RuntimeErrors. These are the words of all that torch 2.13 raised as ranks were killed or hung and
# links were cut (tests/faults); other backends and the store have DistErrors.
_WORDS = re.compile(
    r"gloo|pair closure|Timed out waiting|Connection (closed|reset|refused)|Broken pipe|No route to host|Socket Timeout"
)
_NOISE = re.compile(r"^\[\S+\] |\.? This is typically caused by.*", re.DOTALL)  # torch's build path; "GLHF!"


def is_lost(error: BaseException) -> bool:
    """Whether `error` tells that another rank is gone, hangs, or cannot be reached."""
    if not isinstance(error, RuntimeError) or isinstance(error, GradSyncError):
        return False
    kinds = getattr(dist, "DistError", ())  # absent where torch was built without distributed
    return isinstance(error, kinds) or _WORDS.search(str(error)) is not None


def lost(error: BaseException, what: str) -> GradSyncError:
    """The error to raise from `error`: every rank was needed for `what`."""
    return GradSyncError(waited(what, _NOISE.sub("", str(error))))


def waited(what: str, why: str = "the error that follows says how that ended") -> str:
    """What to tell whoever waited for other ranks in vain."""
    return (
        f"Every rank must take part in {what}, but this one waited in vain: {why}. A rank has ended or hangs, or the "
        "way to it is cut; its own output says why. Start the job again from its last checkpoint, as torchrun "
        "--max-restarts does by itself."
    )


class WaitingFor:
    """Context manager: an error inside that tells of a lost rank says that it was `what()` that was waited for."""

    __slots__ = ("_what",)

    def __init__(self, what: Callable[[], str]) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and is_lost(error):
            raise lost(error, self._what()) from error
