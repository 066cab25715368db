"""`no_sync` and `sync_gradients`, for loops by hand: the decorator and the iterator do not use these two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from gradsync._errors import GradSyncError
from gradsync.engines import Engine, find, uncovered
from gradsync.functional._team.hold import Hold
from gradsync.functional._team.team import Team
from gradsync.functional._update.contexts import named_range
from gradsync.ranks.group import require_group, several_ranks
from gradsync.ranks.lost import WaitingFor


class no_sync(Hold):  # noqa: N801 - a function to its users, like torch's own
    """Context manager: gradients of backwards inside stay local, on whatever engine holds the models.

    Put the forward inside too: some engines read the switch there, some in backward. It restores what it found, and
    can be nested. On one process it does nothing, nor does `enabled=False`.

    >>> model = torch.nn.Linear(2, 1)
    >>> with gradsync.no_sync(model):
    ...     model(torch.ones(1, 2)).sum().backward()
    """

    def __init__(self, *models: nn.Module, enabled: bool = True) -> None:
        modules = check_modules(models, "no_sync")
        require_group("no_sync")
        engines = find(modules) if enabled else []
        _insist_on_engines(modules if enabled else (), engines)
        super().__init__(engines)


def _insist_on_engines(models: Iterable[nn.Module], engines: Sequence[Engine]) -> None:
    """Raise on several ranks for a model without an engine: there is nothing to hold back."""
    names = uncovered(models, engines) if several_ranks() else []
    if names:
        raise GradSyncError(
            f"no_sync holds the gradients of an engine back, but nothing synchronises {', '.join(names[:3])}"
            f"{' and others' if len(names) > 3 else ''} on these ranks: the model is bare. Put it on an engine first, "
            "model = gradsync.ddp(model), or let accumulating or sync_every put DDP behind it."
        )


def check_modules(models: object, caller: str) -> tuple[nn.Module, ...]:
    """`models`, one module or several, as a tuple; a TypeError for anything else."""
    several: tuple[Any, ...] = tuple(models) if isinstance(models, tuple | list) else (models,)
    for model in several:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"gradsync.{caller} needs modules, but one argument is a {type(model).__name__}. Pass the model itself."
            )
    if not several:
        raise TypeError(f"gradsync.{caller} needs at least one module, but none came. Pass the model.")
    return several


def sync_gradients(*models: nn.Module) -> None:
    """Synchronise the accumulated gradients, without another backward. Collective.

    The engine's own averaging and the user's communication hook are used. Every rank calls it; one without gradients
    adds nothing. A parameter that no rank has a gradient for keeps None: a DDP that does not look for unused parameters
    cannot tell which these are, so its ranks tell each other in a small table. So every rank calls it: a
    backward that synchronises on another rank does not meet it.

    >>> model = torch.nn.Linear(2, 1)
    >>> with gradsync.no_sync(model):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> gradsync.sync_gradients(model)
    """
    modules = check_modules(models, "sync_gradients")
    with WaitingFor(lambda: "sync_gradients"), named_range("gradsync.sync"):
        team = Team("sync_gradients", modules)
        for engine in team.engines:
            if engine.trainable():
                engine.reduce_together(team.tables)
