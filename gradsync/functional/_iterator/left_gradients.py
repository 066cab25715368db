"""Gradients that an update or a loop over `sync_every` has left, and that must not come into the next window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import CodeType, FrameType

import torch
from torch import nn

from gradsync._errors import GradSyncError
from gradsync._frames import is_left_on_purpose
from gradsync.functional._team.team import Team
from gradsync.functional._update.gradients import values_here
from gradsync.functional._window.driver import Run

_LEFT = "_gradsync_left"  # of a gradient that a window left behind, or an update used: its version then


def leave(run: Run, error: BaseException, frame: FrameType | None, loop: Sequence[CodeType]) -> None:
    """The loop is left. Gradients of half a window are its user's, to be dropped before the next begins.

    An exception drops them; `frame` is the one that the loop is in. Where what it is zipped with has ended (FOR_ITER),
    it is left on purpose.
    """
    if not isinstance(error, GeneratorExit) or not is_left_on_purpose(frame, loop, "FOR_ITER"):
        run.discard()
        return
    if run.index and not run.is_plain:
        mark(run.fitting_team().parameters)
    run.abandon()


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Note that these gradients are to be cleared before the next window."""
    for parameter in parameters:
        if parameter.grad is not None:
            setattr(parameter.grad, _LEFT, parameter.grad._version)


def insist_on_none_left(team: Team) -> list[torch.Tensor]:
    """Raise where a window begins with gradients of an update, or of a loop that was left.

    Returns of each other gradient whether it has a value that is not zero.
    """
    gradients = [parameter.grad for parameter in team.parameters if parameter.grad is not None]
    there = [values_here(gradient).any() for gradient in gradients]
    left = [one for gradient, one in zip(gradients, there, strict=True) if _is_marked(gradient)]
    if any(left):  # their values count, because .data.zero_() makes no new version
        raise GradSyncError(
            f"A window must begin without gradients, but {len(left)} parameters still have those of an update, or of a "
            "loop over sync_every that was left in the middle of a window. Call optimizer.zero_grad() after each "
            "optimizer.step(), and behind such a loop."
        )
    return there


def _is_marked(gradient: torch.Tensor) -> bool:
    return bool(vars(gradient).get(_LEFT) == gradient._version)


def insist_on_none_inside(team: Team) -> None:
    """Raise where a window begins with gradients that an engine keeps where no `zero_grad` reaches them."""
    inside = team.num_inside() if team.holds_inside else 0
    if inside:
        raise GradSyncError(
            f"A window must begin without gradients, but the engine holds those of {inside} parameters, of a loop that "
            "was left in the middle of a window, or of backwards of your own. zero_grad() does not reach them: call "
            "gradsync.sync_gradients(model), and optimizer.zero_grad() behind it to drop them."
        )
