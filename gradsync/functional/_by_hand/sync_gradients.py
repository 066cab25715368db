"""`sync_gradients`: synchronise what has been accumulated."""

from __future__ import annotations

from torch import nn

from gradsync.functional._by_hand.no_sync import check_modules
from gradsync.functional._team.team import Team
from gradsync.functional._update.profiler_ranges import named_range
from gradsync.ranks.group import require_group
from gradsync.ranks.lost import WaitingFor


def sync_gradients(*models: nn.Module) -> None:
    """Synchronise the accumulated gradients, without another backward. Collective.

    The engine's own averaging and the user's communication hook are used. Every rank calls it; one without gradients
    adds nothing. A parameter that no rank has a gradient for keeps None: a DDP that does not look for unused parameters
    cannot tell which these are, so its ranks tell each other in a small table. For that reason it is no counterpart to
    a backward that synchronises on another rank.

    >>> model = torch.nn.Linear(2, 1)
    >>> with gradsync.no_sync(model):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> gradsync.sync_gradients(model)
    """
    modules = check_modules(models, "sync_gradients")
    require_group("sync_gradients")
    with WaitingFor(lambda: "sync_gradients"), named_range("gradsync.sync"):
        team = Team("sync_gradients", modules)
        for engine in team.engines:
            if engine.trainable():
                engine.reduce_together(team.line)
