"""The update at a boundary, in the right order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync._errors import GradSyncError
from gradsync._state import STEPPING, open_runs
from gradsync.functional._update.contexts import named_range
from gradsync.functional._update.grad_scaler import found_inf, is_scaling, unscale
from gradsync.functional._update.gradients import Spread, all_finite, clip, normalise
from gradsync.functional._update.optimizers import owned, step_one, zero
from gradsync.functional._update.schedulers import move

NonFinite = Literal["step", "skip", "raise"]


class Update(NamedTuple):
    """What an update did."""

    stepped: bool
    grad_norm: torch.Tensor | None


def update(
    optimizers: Sequence[Optimizer],
    *,
    schedulers: Iterable[Any] = (),
    scaler: GradScaler | None = None,
    clip_norm: float | None = None,
    factor: float = 1.0,
    nonfinite: NonFinite = "step",
    spread: Spread | None = None,
    then: Callable[[Update], object] = bool,
) -> Update:
    """Unscale, normalise by `factor`, clip, step, update the scaler, step the schedulers, and zero the gradients.

    The gradients are synchronised already. The schedulers step only if the optimizers really stepped. `grad_norm` is
    over all optimizers, from before clipping; None without `clip_norm`. `spread` is explained at `norm`. `then` is
    called between the optimizers' step and the schedulers'.

    >>> weight = torch.nn.Parameter(torch.ones(1)); optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> weight.grad = torch.tensor([0.5])
    >>> update([optimizer], clip_norm=1.0), weight.data, weight.grad
    (Update(stepped=True, grad_norm=tensor(0.5000)), tensor([0.5000]), None)
    """
    parameters = owned(optimizers)
    _check_windows(parameters, scaler)
    with named_range("gradsync.update"):
        if is_scaling(scaler):
            unscale(scaler, optimizers, parameters, spread)
        normalise(parameters, factor)
        grad_norm = None if clip_norm is None else clip(parameters, clip_norm, spread=spread)
        finite = nonfinite == "step" or all_finite(parameters, spread=spread)
        made = Update(_step(optimizers, scaler, finite=finite), grad_norm)
    try:
        then(made)
        if made.stepped:
            move(schedulers, optimizers)
    finally:
        zero(optimizers)
    if not made.stepped and nonfinite == "raise":
        raise GradSyncError(
            "The gradients of a window must be finite under nonfinite='raise', but an inf or a NaN came. The window is "
            "discarded on every rank; look for its data, or use nonfinite='skip'."
        )
    return made


def _check_windows(parameters: Sequence[nn.Parameter], scaler: GradScaler | None) -> None:
    """Raise for gradients that are held. Rescale those of a window during which the scaler has changed its scale."""
    is_own = get_ident() in STEPPING  # the decorator's update, perhaps of an earlier window than the open one
    if is_own and not is_scaling(scaler):
        return
    ids = {id(parameter) for parameter in parameters}
    for run in open_runs():
        window = run.window
        if window.team.ids.isdisjoint(ids):
            continue
        if not (is_own or window.has_synchronised):
            raise GradSyncError(
                f"An update needs gradients that are synchronised, but the open window of {run.name} holds them on "
                "this rank, until its last micro-batch. Make the update behind that: where backward, miss or flush has "
                "returned a Closing."
            )
        if window.scale is not None and is_scaling(scaler):
            window.scale.correct(window.team.parameters, scaler)


def _step(optimizers: Sequence[Optimizer], scaler: GradScaler | None, *, finite: bool) -> bool:
    """Step all optimizers, or none of them."""
    odd = found_inf(scaler, optimizers) if is_scaling(scaler) else None
    stepped = finite and not odd
    try:
        if stepped:
            for optimizer in optimizers:
                step_one(optimizer)
    except BaseException:
        if is_scaling(scaler):
            for optimizer in optimizers:  # else the scaler refuses to unscale the next window's gradients
                scaler._per_optimizer_states.pop(id(optimizer), None)
        raise
    if is_scaling(scaler) and odd is not None:
        scaler.update()
    return stepped
