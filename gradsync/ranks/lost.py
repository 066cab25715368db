"""A rank that has died, hangs or is out of reach: the errors by which torch tells, and the error that we raise."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch.distributed as dist

from gradsync._errors import GradSyncError

# gloo raises plain RuntimeErrors. torch 2.13 used these words whenever ranks were killed or hung, or links were cut
# (tests/faults). Other backends and the store raise DistErrors.
_WORDS = re.compile(
    r"gloo|pair closure|Timed out waiting|Connection (closed|reset|refused)|Broken pipe|No route to host|Socket Timeout"
)
_NOISE = re.compile(r"^\[\S+\] |\.? This is typically caused by.*", re.DOTALL)  # torch's build path, and its guesses


def is_lost(error: BaseException) -> bool:
    """Whether `error` means that another rank has died, hangs, or cannot be reached."""
    if not isinstance(error, RuntimeError) or isinstance(error, GradSyncError):
        return False
    return isinstance(error, dist.DistError) or _WORDS.search(str(error)) is not None


def lost(error: BaseException, what: str) -> GradSyncError:
    """The error to raise from `error`: every rank was needed for `what`."""
    return GradSyncError(waited(what, _NOISE.sub("", str(error))))


def waited(what: str, why: str = "the error that follows says how that ended") -> str:
    """The words of the error, or of a warning beside torch's own error."""
    return (
        f"Every rank must take part in {what}, but this one waited in vain: {why}. A rank has ended or hangs, or the "
        "way to it is cut; its own output says why. Start the job again from its last checkpoint, as torchrun "
        "--max-restarts does by itself."
    )


class WaitingFor:
    """Context manager: if an error inside means a lost rank, raise an error that says what this rank waited in."""

    __slots__ = ("_what",)

    def __init__(self, what: Callable[[], str]) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and is_lost(error):
            raise lost(error, self._what()) from error
