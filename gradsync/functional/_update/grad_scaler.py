"""`GradScaler`: losses are scaled, gradients unscaled, and all optimizers of a window step or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from typing_extensions import TypeIs

from gradsync._errors import GradSyncError
from gradsync.functional._update.gradients import Spread, known_spread, local_of


def is_scaling(scaler: GradScaler | None) -> TypeIs[GradScaler]:
    """Whether losses are multiplied before their backward."""
    return scaler is not None and scaler.is_enabled()


class Scale:
    """The factor of a `GradScaler` for all losses of a window.

    Two windows may share the scaler. It then changes in the middle of one, when the other closes.
    """

    __slots__ = ("_scaler", "_version", "value")

    def __init__(
        self, value: torch.Tensor, version: tuple[int, int] | None = None, scaler: GradScaler | None = None
    ) -> None:
        self.value = value
        self._scaler = scaler  # kept alive: it is to unscale what it has scaled
        self._version = version  # of the scaler's tensor: tells without a host wait whether it has changed

    @classmethod
    def of(cls, scaler: GradScaler, like: torch.Tensor) -> Scale:
        """The current scale of a scaler."""
        current = _current(scaler, like.device)
        return cls(current.clone(), (id(current), current._version), scaler)

    @staticmethod
    def insist_on_unscaled(scaler: GradScaler, loss: torch.Tensor) -> None:
        """Raise for what `scaler.scale(...)` has returned: a product, with the scaler's own tensor."""
        node, scale = loss.grad_fn, scaler._scale
        if scale is None or node is None or node.name() != "MulBackward0":
            return
        other: Any = getattr(node, "_saved_other", None)
        if isinstance(other, torch.Tensor) and other.data_ptr() == scale.data_ptr():
            raise GradSyncError(
                "The loss must come as it is, because it is scaled here by the GradScaler that takes part, but it was "
                "scaled by scaler.scale(loss) already. Return the loss itself."
            )

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, scaled."""
        return loss * self.value.to(loss.device, non_blocking=True)

    def correct(self, parameters: Iterable[nn.Parameter], scaler: GradScaler) -> None:
        """Rescale gradients from this scale to the scaler's current scale, by which it will unscale. No host wait."""
        current = _current(scaler, self.value.device)
        if self._version == (id(current), current._version):
            return
        factor = current / self.value.to(current.device)
        for parameter in parameters:
            if parameter.grad is not None:
                local = local_of(parameter.grad)
                local.mul_(factor.to(local.device, non_blocking=True))


def _current(scaler: GradScaler, device: torch.device) -> torch.Tensor:
    """The scaler's scale, made on `device` where it has scaled nothing yet in this process."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    assert scaler._scale is not None, "made by now"
    return scaler._scale  # get_scale() waits for the device


def unscale(
    scaler: GradScaler, optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter], spread: Spread | None
) -> None:
    """Divide the gradients by the scale, and take note of infs."""
    _check_kinds(scaler, parameters, spread)
    _current(scaler, parameters[0].device)  # a rank without a micro-batch so far has none
    for optimizer in optimizers:
        if any(one.grad is not None for group in optimizer.param_groups for one in group["params"]):
            scaler.unscale_(optimizer)  # which the scaler allows once, until an update with a gradient


def found_inf(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> bool | None:
    """Whether any gradient had an inf or a NaN when it was unscaled; None if there was no gradient.

    The scaler is told so of all optimizers.

    A scaler skips each optimizer by itself if that one has an inf. Here none of them steps if any has one. Nothing else
    of the scaler's own `step` is needed, because the gradients are unscaled already.
    """
    flags = [flag for optimizer in optimizers for flag in scaler._found_inf_per_device(optimizer).values()]
    if not flags:
        return None
    odd = torch.stack([flag.to(flags[0].device, non_blocking=True) for flag in flags]).sum()
    for flag in flags:
        flag.copy_(odd.clamp(max=1.0), non_blocking=True)
    return bool(odd)


def _check_kinds(scaler: GradScaler, parameters: Sequence[nn.Parameter], spread: Spread | None) -> None:
    """Raise if the scaler cannot unscale all of these."""
    sharded = not known_spread(parameters, spread).keys().isdisjoint(map(id, parameters))
    if sharded and not hasattr(scaler, "process_group"):
        raise GradSyncError(
            "Gradients that FullyShardedDataParallel has sharded need a scaler that asks all ranks whether one came "
            f"upon an inf, but the scaler is a {type(scaler).__name__}, which asks its own rank. Use "
            "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler."
        )
    if len({hasattr(p.grad, "device_mesh") for p in parameters if p.grad is not None}) > 1:
        raise GradSyncError(
            "A GradScaler can unscale either DTensors or plain gradients, but the parameters of this update have both. "
            "Call fully_shard on the whole model, its root included, so that all of them are DTensors."
        )
