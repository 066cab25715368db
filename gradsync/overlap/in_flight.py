"""A window whose gradients travel: from its boundary to its landing.

    in_flight = depart(flights, optimizers, models, land)   as it closes
    in_flight = step_ahead(in_flight, factor=...)           the provisional step, with the gradients that are there
    in_flight = go_back(in_flight)                          parameters are the last true ones again; waits for nothing
    with landing(in_flight):                                inside, they also have the true gradients: clip and step

Each function returns what the next one takes. Its argument can still be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradsync._errors import GradSyncError
from gradsync.functional import Who, bare_optimizer, discard
from gradsync.overlap.provisional import owned_trainable, provisional_step
from gradsync.overlap.saved import Saved
from gradsync.overlap.travel import Flight
from gradsync.overlap.watch import Watch

LEFT = (
    "Gradients were still travelling, and their update was not made, as {what} ended: its parameters lack their last "
    "update. Call settle() or flush() before, or loop with .over, which lands them."
)
"""A warning; `what` is the function, or the program, or the process group."""


@dataclass(frozen=True, eq=False)
class InFlight:
    """The gradients of one window between their departure and their landing."""

    flights: Sequence[Flight]
    who: Who  # refers weakly: dropping a model and its optimizer frees them, and what travels with them
    parameters: Sequence[nn.Parameter]  # those that travel, and those of the optimizers
    all_used: bool  # by this rank
    watch: Watch
    saved: Saved | None = None  # undoes the provisional step, if one was made
    spare: Saved | None = None  # memory for the next one


def depart(
    flights: Sequence[Flight],
    optimizers: Sequence[Optimizer],
    models: Sequence[nn.Module] = (),
    land: Callable[[], object] | None = None,
) -> InFlight:
    """A window has closed: `flights` have its gradients, and `parameter.grad` still has this rank's own.

    From here on, writes to the parameters are noticed, and `state_dict()` of the models, their modules and the
    optimizers calls `land` first. Set `spare` to what an earlier window has saved, to use that memory again.
    """
    who = Who(models, [bare_optimizer(optimizer) for optimizer in optimizers])
    travelling = [parameter for flight in flights for parameter in flight.parameters]
    parameters = list({id(one): one for one in (*travelling, *owned_trainable(who.optimizers))}.values())
    all_used = all(parameter.grad is not None for parameter in travelling)
    return InFlight(flights, who, parameters, all_used, Watch(parameters, who, land))


def step_ahead(
    in_flight: InFlight,
    *,
    factor: float | None,
    clip_norm: float | None = None,
    nonfinite: Literal["step", "skip", "raise"] = "step",
) -> InFlight:
    """Call `provisional_step`. This rank's own gradients are gone afterwards, even if no step was made."""
    groups = {flight.group for flight in in_flight.flights}
    if dist.group.WORLD is not None:
        groups.add(dist.group.WORLD)
    try:
        saved = provisional_step(
            in_flight.who.optimizers,
            factor=factor,
            clip_norm=clip_norm,
            nonfinite=nonfinite,
            groups=groups,
            spare=in_flight.spare,
        )
    finally:
        discard(in_flight.parameters)
        in_flight.watch.note()
    return replace(in_flight, saved=saved, spare=in_flight.spare if saved is None else None)


def go_back(in_flight: InFlight) -> InFlight:
    """Undo the provisional step, if one was made: parameters are the last true ones. Waits for nothing."""
    if in_flight.saved is None:
        return in_flight
    in_flight.saved.put_back()
    in_flight.watch.note()
    return replace(in_flight, saved=None, spare=in_flight.saved)


@contextmanager
def landing(in_flight: InFlight) -> Iterator[None]:
    """Inside, parameters are the last true ones and their gradients the means over the ranks: make the true update.

    Gradients that the next window holds in `grad` are taken out, and put back afterwards. If somebody has written to
    the parameters, or the gradients do not arrive, a GradSyncError is raised, and the parameters stay the last true
    ones.
    """
    held = [(parameter, parameter.grad) for parameter in in_flight.parameters]
    try:
        try:
            in_flight.watch.check()
        finally:
            in_flight = go_back(in_flight)
        arrived = _arrive(in_flight)
        in_flight.watch.end()
        for parameter in in_flight.parameters:
            parameter.grad = arrived.pop(parameter, None)
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


def _arrive(in_flight: InFlight) -> dict[nn.Parameter, torch.Tensor | None]:
    arrived: dict[nn.Parameter, torch.Tensor | None] = {}
    try:
        for flight in in_flight.flights:
            arrived.update(flight.arrive(all_used=in_flight.all_used))
    except RuntimeError as error:
        raise GradSyncError(
            "The gradients of a window travelled while the next one computed, and had to arrive for its update, but "
            f"they did not: {error}. The parameters are those of the last update that was made; look for the rank "
            "that is missing."
        ) from error
    return arrived
