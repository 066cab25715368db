"""`sync_gradients`: synchronise what is accumulated already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsync.functional._backward import reduce
from gradsync.functional._no_sync import check_modules
from gradsync.functional._team import Team
from gradsync.ranks.group import require_group
from gradsync.ranks.lost import WaitingFor

if TYPE_CHECKING:
    from torch import nn


def sync_gradients(*models: nn.Module) -> None:
    """Synchronise the accumulated gradients without another backward: for a tail, or a loop of one's own.

    The engine's own averaging and the user's communication hook are used, and the collectives match those of a
    backward that synchronises, so that one rank may do this while another does that. Collective. A rank may hold no
    gradients at all; it then adds nothing.

    >>> model = torch.nn.Linear(2, 1)
    >>> with gradsync.no_sync(model):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> gradsync.sync_gradients(model)
    """
    modules = check_modules(models, "sync_gradients")
    require_group("sync_gradients")
    with WaitingFor(lambda: "sync_gradients"):
        team = Team("sync_gradients", modules)
        reduce([engine for engine in team.engines if engine.trainable()])
