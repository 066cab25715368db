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


def refuse_use_elsewhere(num_lacking: int) -> None:
    """Raise if this rank has left out so many parameters that another rank used, and groups cannot reduce zeros."""
    if num_lacking:
        raise GradSyncError(
            "Before torch 2.13, the ranks of a fully sharded model must use the same parameters in a window, because a "
            f"group reduces only those that have a gradient, but this rank has left out {num_lacking} that another "
            f"rank used, and this is torch {torch.__version__}. Use all on every rank (loss + 0 * unused.sum()), or "
            "a later torch."
        )
