"""What `state_dict` of a decorated function returns, read back: its shape, and which of it can be checked when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsync._errors import GradSyncError
from gradsync._progress import Progress
from gradsync.functional._window import window_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from gradsync.functional._window import Steps

VERSION = 1

OR_WITHOUT_IT = "; or, if it was saved at a boundary, go on without it: it then holds counters only."
"""How an error about a state ends."""


def windows_in(state: object) -> list[dict[str, Any]]:
    """The states of a function's windows, in the order of their first call."""
    version = state.get("version") if isinstance(state, dict) else None
    if not isinstance(state, dict) or version != VERSION:
        raise ValueError(
            f"load_state_dict needs what state_dict of a decorated function returned, version {VERSION}, but what came "
            + (f"has version {version!r}." if isinstance(state, dict) else f"is of type {type(state).__name__}.")
        )
    return list(state["windows"])


def check_steps_of(state: Mapping[str, Any], name: str, steps: Steps) -> None:
    """Raise if a state was saved with other steps, as far as that can be told: of a function, in an open window."""
    number = steps if isinstance(steps, int) else None
    saved, here = state["steps"], number
    if state["index"] and saved == here:
        saved, here = state["size"], window_size(steps, state["window"])
    if saved != here:
        raise GradSyncError(
            f"A state of {name} can be loaded with the steps that it was saved with, {_said(saved)}, but there are "
            f"{_said(here)}. Use the same{OR_WITHOUT_IT}"
        )


def progress_in(state: Mapping[str, Any]) -> Progress:
    """Where a state stands that waits for its window's first call."""
    names = ("micro_steps", "updates", "window", "index", "size", "skipped", "dropped", "replays")
    return Progress(**{name: state[name] for name in names})


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module in `DistributedDataParallel` and `torch.compile`."""
    from torch.nn.parallel import DistributedDataParallel

    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def _said(steps: int | None) -> str:
    return "a function" if steps is None else str(steps)
