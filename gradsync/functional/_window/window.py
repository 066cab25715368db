"""`Window`: the micro-batches of this rank since the last boundary. It exists only while it is open."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.amp import GradScaler

from gradsync._errors import GradSyncError
from gradsync._loss import MEANS, NO_LOSS, PLAIN, SUMS, Count, LossSum
from gradsync._state import LATE, open_runs
from gradsync.engines import Engine
from gradsync.functional._team.team import Team
from gradsync.functional._update.grad_scaler import Scale, is_scaling
from gradsync.ranks.tables import Sent


@dataclass(slots=True, eq=False)
class Window:
    """What has come so far on this rank: the number of micro-batches, their losses and counts.

    `index` counts all places, those too that were dropped, repeated or missed.
    """

    team: Team
    number: int
    size: int
    keeps_losses: bool = True
    left_by_loop: bool = False  # ranks may have brought different numbers, and it closes behind the loop
    active: Sequence[Engine] = field(init=False)  # the engines with anything to train
    sizes: Sent | None = None  # the sizes of all ranks' windows, if the ranks were asked
    heard: Sent | None = None  # the table of all ranks, if it was sent before the boundary
    index: int = 0
    num_own: int = 0  # calls of this rank, without replays
    num_micro_batches: int = 0
    num_dropped: int = 0  # dropped calls
    kind: float = NO_LOSS
    count: Count = field(default_factory=Count)
    losses: list[torch.Tensor] = field(default_factory=list)
    failed: bool = False  # whether a backward failed with an exception in `skip`
    scale: Scale | None = None
    has_synchronised: bool = False  # then nothing is left but its update
    is_warned_of: bool = False  # whether the user knows that it was left open

    def __post_init__(self) -> None:
        self.active = [engine for engine in self.team.engines if engine.trainable()]

    def add(self, loss: torch.Tensor | LossSum) -> None:
        """Count a micro-batch of this loss. The loss is not checked, because it may be detached already."""
        tensor, kind = (loss.loss, SUMS) if isinstance(loss, LossSum) else (loss, MEANS)
        if kind != self.kind:
            if self.kind != NO_LOSS:
                raise GradSyncError(
                    "All losses of a window must be of one kind, but a LossSum and a mean came. Return a LossSum in "
                    "each micro-batch, or in none."
                )
            self.kind = kind
        if isinstance(loss, LossSum):
            self.count.add(loss.count)
        self.num_micro_batches += 1
        self.num_own += 1
        if self.keeps_losses:
            self.losses.append(tensor.detach().clone())  # a copy: the caller may write to the loss that it gets back

    def add_plain(self) -> None:
        """Count a micro-batch whose backward is the user's own."""
        self.num_micro_batches += 1
        self.num_own += 1
        self.kind = PLAIN

    def drop(self) -> None:
        """Count a call without a micro-batch."""
        self.num_own += 1
        self.num_dropped += 1

    def fail(self) -> bool:
        """A backward failed with an exception in `skip`: all ranks drop this window, as the table tells them.

        Returns whether they can; else the exception goes on.
        """
        if self.team.forward_communicates:
            return False
        for engine in self.active:
            engine.trainable()  # raises where the engine cannot go on after such a failure (a static graph)
        self.num_dropped += 1
        self.failed = True
        self.team.drop_gradients()
        return True

    @property
    def asked(self) -> Sequence[Engine]:
        """The engines that are asked whether this rank has used their parameters wrongly.

        A rank without a micro-batch has nothing to use them in, and a window that failed makes no update.
        """
        return self.active if self.num_micro_batches and not self.failed else ()

    def what(self) -> str:
        """What this rank waits for, for the error if another rank is lost."""
        return f"synchronising the gradients of window {self.number} of {self.team.name}"

    def state(self) -> dict[str, Any]:
        """What has come so far, without the gradients: numbers and tensors."""
        return {
            "size": self.size,
            "calls": self.num_own,
            "num_micro_batches": self.num_micro_batches,
            "kind": self.kind,
            "count": self.count.state(),
            "losses": [loss.clone() for loss in self.losses],
            "failed": self.failed,
            "scale": None if self.scale is None else self.scale.value.clone(),
        }

    def load(self, state: Mapping[str, Any], index: int) -> None:
        """Put such a state into a window that has just been opened."""
        device = self.team.parameters[0].device
        self.index, self.num_own = index, state["calls"]
        self.left_by_loop = True  # it may have been, on all ranks
        self.num_micro_batches, self.kind, self.failed = state["num_micro_batches"], state["kind"], state["failed"]
        self.count.load(state["count"])
        self.losses = [loss.to(device) for loss in state["losses"]]
        self.scale = None if state["scale"] is None else Scale(state["scale"].to(device))


def weigh(
    window: Window, loss: torch.Tensor | LossSum, scaler: GradScaler | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensor from which to run the backward of a loss, and the gradient to begin with (None: 1)."""
    tensor, seed = (loss.loss, None) if isinstance(loss, LossSum) else (loss, _seed_of_mean(window, loss))
    if is_scaling(scaler):
        if window.scale is None and window.num_micro_batches:
            raise _scaled_in_part(window, "came")
        Scale.insist_on_unscaled(scaler, tensor)
        window.scale = window.scale or Scale.of(scaler, tensor)
        tensor = window.scale.apply(tensor)
    elif window.scale is not None:
        raise _scaled_in_part(window, "went")
    return tensor, seed


def _scaled_in_part(window: Window, what: str) -> GradSyncError:
    return GradSyncError(
        f"All losses of a window of {window.team.name} must be scaled, or none of them, but a GradScaler {what} in the "
        "middle of one. Pass it for each micro-batch, and call flush() or reset() before that changes."
    )


def _seed_of_mean(window: Window, loss: torch.Tensor) -> torch.Tensor:
    """One over the window's size: bitwise what the backward of `loss / size` passes on, without that division."""
    key = (window.size, loss.dtype, loss.device, loss.shape)
    seeds = window.team.seeds
    seed = seeds.get(key)
    # If the loss is a view of a parameter, the seed itself becomes a gradient, and is written to later.
    if seed is None or seed._version:
        if len(seeds) > 16:  # a user's steps may take any number of values
            seeds.clear()
        seed = seeds[key] = torch.ones_like(loss, requires_grad=False) / window.size
    return seed


def insist_on_one_window(name: str, ids: Collection[int], *, but: object) -> None:
    """Raise if one of these parameters is in the open window of a run, but for the run `but`, which opens one."""
    for other in open_runs():
        if other is not but and not other.window.team.ids.isdisjoint(ids):
            raise GradSyncError(
                f"A parameter can be in one open window at a time, but {name} begins one with parameters that "
                f"are in the open window of {other.name}. Call {other.name}.flush() or .reset() first (a loop over "
                "sync_every: end its window), or keep the other model out of one of the optimizers."
            )


def settle_travelling(ids: Collection[int], *, always: object = None, never: object = None) -> None:
    """Land the gradients that travel to these parameters.

    Those of the run `always` land whatever its parameters, and those of the run `never` do not.
    """
    for other in list(LATE) if LATE else ():
        if other.run is always or (other.run is not never and not other.ids.isdisjoint(ids)):
            other.settle()
