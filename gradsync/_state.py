"""What `state_dict` of a decorated function returns, read back: its shape, and which of it can be checked when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync._errors import GradSyncError
from gradsync._progress import Progress
from gradsync.functional._window import window_size

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """Raise if a state was saved with other steps; where these are functions, that shows in an open window only."""
    saved, here = state["steps"], steps
    if state["index"]:
        saved, here = state["size"], window_size(steps, state["window"])
    if isinstance(saved, int) and isinstance(here, int) and saved != here:
        raise GradSyncError(
            f"A state of {name} can be loaded with the steps that it was saved with, {saved}, but there are {here}. "
            f"Use the same{OR_WITHOUT_IT}"
        )


def progress_in(state: Mapping[str, Any]) -> Progress:
    """Where a state stands that waits for its window's first call."""
    names = ("micro_steps", "updates", "window", "index", "size", "skipped", "dropped", "replays")
    return Progress(**{name: state[name] for name in names})


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module in `DistributedDataParallel` and `torch.compile`."""
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model
