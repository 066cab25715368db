"""`sync_gradients`: synchronise what has been accumulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsync.functional._no_sync import check_modules
from gradsync.functional._order import reduce
from gradsync.functional._team import Team
from gradsync.ranks.group import require_group
from gradsync.ranks.lost import WaitingFor

if TYPE_CHECKING:
    from torch import nn


def sync_gradients(*models: nn.Module) -> None:
    """Synchronise the accumulated gradients, without another backward. Collective.

    The engine's own averaging and the user's communication hook are used. The collectives match those of a backward
    that synchronises: one rank may call this while another runs such a backward. A rank without gradients adds
    nothing.

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
