"""What `state_dict` of a decorated function returns, read back: its shape, and which of it can be checked when."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync._errors import GradSyncError
from gradsync._progress import Progress
from gradsync.functional._window import window_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.amp import GradScaler

    from gradsync.functional._window import Steps

VERSION = 1

# What FSDP1, activation checkpointing and torch.compile call the module that they wrap.
_WRAPPED = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}

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


def own_names(names: Iterable[str]) -> dict[str, str]:
    """Each parameter's name without its wrappers', or the name itself where two would become one."""
    own = {}
    for name in names:
        *modules, last = name.split(".")
        own[name] = ".".join([*(module for module in modules if module not in _WRAPPED), last])
    count = Counter(own.values())
    return {name: short if count[short] == 1 else name for name, short in own.items()}


def check_state(
    state: Mapping[str, Any], name: str, steps: Steps, num_ranks: int, names: Mapping[str, nn.Parameter]
) -> None:
    """Raise if a state belongs to other steps, models or ranks."""
    here = {name: list(parameter.shape) for name, parameter in names.items()}
    check_steps_of(state, name, steps)
    if state["num_ranks"] != num_ranks:
        raise GradSyncError(
            f"A state of {name} can be loaded on as many ranks as it was saved on, {state['num_ranks']}, but "
            f"there are {num_ranks}. Start that many{OR_WITHOUT_IT}"
        )
    if state["parameters"] != here:
        saved = state["parameters"]
        odd = sorted(name for name in {**saved, **here} if saved.get(name) != here.get(name))
        raise GradSyncError(
            f"A state of {name} can be loaded for the parameters that it was saved for, names and shapes, but "
            f"these differ in {', '.join(odd[:5])}{' and others' if len(odd) > 5 else ''}. Call it with the same "
            f"models and optimizers{OR_WITHOUT_IT}"
        )


def scale_of(scaler: GradScaler | None) -> float:
    """What the held gradients are multiplied by."""
    return 1.0 if scaler is None else scaler.get_scale()


def check_scale(held: float, scaler: GradScaler | None, name: str) -> None:
    """Raise if gradients that were held in another process were scaled by another number than those from here."""
    if held != scale_of(scaler):
        raise GradSyncError(
            f"A window that is resumed in its middle needs the scaler that it began with, but the gradients in the "
            f"state of {name} are scaled by {held:g}, and those since then by {scale_of(scaler):g}. Save "
            "scaler.state_dict() in the same checkpoint, and load both."
        )
