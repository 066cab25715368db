"""Refuses settings of a `fully_shard` model that gradsync cannot keep exact, or that this torch cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gradsync._errors import GradSyncError
from gradsync.engines import _torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def refuse_other_reductions(groups: Iterable[FSDPParamGroup], states: Iterable[Any]) -> None:
    """Raise unless each backward averages over the ranks, and ends its own reductions."""
    if any(group.gradient_divide_factor is not None for group in groups):
        raise GradSyncError(
            "gradsync needs the engine to average gradients over the ranks, but this model's "
            "set_gradient_divide_factor was called, which makes that something else. Leave it out: a LossSum gives "
            "a mean over tokens."
        )
    if any(map(_torch.finalizes_by_hand, states)):
        raise GradSyncError(
            "gradsync needs a backward to end its own reductions, but this model's "
            "set_manual_backward_finalization(True) was called, which leaves that to its user. Leave it out."
        )


def insist_on_shards(groups: Sequence[FSDPParamGroup]) -> None:
    """Raise if a group cannot reduce zeros for parameters that a micro-batch did not use."""
    if not _torch.can_reduce_unused(groups):
        raise GradSyncError(
            'sync="shard" needs torch 2.13 or later on a fully sharded model, because before that a group cannot '
            "reduce zeros for parameters that a micro-batch did not use, but this is torch "
            f'{torch.__version__}. Use sync="window" or "each".'
        )
