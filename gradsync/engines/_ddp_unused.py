"""Parameters that a window, or no rank, has used, where DDP's reducer gives zeros to those that have no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from gradsync.ranks.tables import Tables


def used_anywhere(parameters: Sequence[nn.Parameter], tables: Tables) -> list[bool]:
    """Whether any rank has a gradient, by parameter. Collective."""
    rows = tables.send([float(parameter.grad is not None) for parameter in parameters]).rows()
    return [any(flags) for flags in zip(*rows, strict=True)]


def forget_unused(parameters: Sequence[nn.Parameter], used: Iterable[object]) -> None:
    """Make None what the reducer has made of the parameters that no rank used."""
    for parameter, anywhere in zip(parameters, used, strict=True):
        if not anywhere:
            parameter.grad = None


def names_of(named: Iterable[tuple[str, nn.Parameter]], some: Sequence[nn.Parameter]) -> str:
    """Their names, in the order of the model."""
    return ", ".join(name for name, p in named if any(p is one for one in some))


def unused_message(names: str) -> str:
    """What is wrong with a DDP that looks for no unused parameters, if a window has not used these."""
    return (
        f"Every trainable parameter of a DistributedDataParallel model must be used in each window, but on this rank "
        f"no micro-batch of the window used {names}. Pass find_unused_parameters=True to DistributedDataParallel, or "
        "hand gradsync the bare model, which needs no such flag."
    )


def changed_message(unused: str, new: str) -> str:
    """What is wrong with a static graph, if a window has not used some parameters, and has used new ones."""
    what = [f"no micro-batch of the window used {unused}, which the first one used"] if unused else []
    what += [f"{new} got a gradient, which no rank's first one gave it, and which stays unsynchronised"] if new else []
    return (
        "A DistributedDataParallel with static_graph=True must use the same parameters in each window as in its very "
        f"first micro-batch, but on this rank {'; and '.join(what)}. Leave static_graph out and pass "
        "find_unused_parameters=True, or hand gradsync the bare model, which needs no such flag."
    )
