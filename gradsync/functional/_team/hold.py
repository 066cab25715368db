"""What becomes of gradients: kept local (`Hold`), not made (`Bystanders`), made zeros (`weightless`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gradsync._state import SWITCHING
from gradsync.engines import Engine


class Hold:
    """Context manager: the gradients of backwards inside stay local. It can be entered often, and nested.

    It is a class, and one object serves many micro-batches: in each of them a generator would cost five times as much.
    """

    __slots__ = ("_found", "_pairs")

    def __init__(self, engines: Sequence[Engine | Bystanders], sync: str = "window") -> None:
        # "shard": gradients are reduced among the ranks of a shard group; the all-reduce across replicas is held.
        how = "hold_shards" if sync == "shard" else "hold"
        self._pairs = [(getattr(engine, how, engine.hold), engine.restore) for engine in engines]
        self._found: list[Any] = []

    def __enter__(self) -> None:
        for hold, _ in self._pairs:
            self._found.append(hold())

    def __exit__(self, *error: object) -> None:
        for _, restore in reversed(self._pairs):
            restore(self._found.pop())


# Two threads may hold one teacher: the first to end must not switch it on for the other. The number of holders stands
# on the parameter itself, while there are any.
_HOLDERS = "_gradsync_holders"


class Bystanders:
    """The parameters of bystanders: gradients flow through them, and none stay in them. Their engines are held.

    They are held from before the forward until after the backward, in which checkpointed layers run their forward
    again.
    """

    __slots__ = ("engines", "parameters")

    def __init__(self, parameters: Sequence[nn.Parameter] = (), engines: Sequence[Engine] = ()) -> None:
        self.parameters = parameters
        self.engines = engines

    def __bool__(self) -> bool:
        return bool(self.parameters or self.engines)

    @property
    def forward_communicates(self) -> bool:
        """Whether one of their forwards waits for the other ranks."""
        return any(engine.forward_communicates for engine in self.engines)

    def hold(self) -> tuple[list[Any], list[nn.Parameter]]:
        """Switch `requires_grad` of these parameters off; returns what `restore` needs."""
        for engine in self.engines:
            engine.ungather()  # parameters that are gathered already would not see the switch
        found = [(engine.hold(), engine.before_frozen()) for engine in self.engines]
        switched_off = []
        with SWITCHING:
            for parameter in self.parameters:
                state = vars(parameter)
                holders = state.get(_HOLDERS, 0)
                if holders or parameter.requires_grad:
                    state[_HOLDERS] = holders + 1
                    parameter.requires_grad_(False)
                    switched_off.append(parameter)
        return found, switched_off

    def restore(self, found: tuple[list[Any], list[nn.Parameter]]) -> None:
        """Switch on exactly what was switched off, unless another thread still holds it."""
        flags, switched_off = found
        try:
            for engine in self.engines:
                engine.ungather()  # what is gathered is still switched off
        finally:
            with SWITCHING:
                for parameter in switched_off:
                    state = vars(parameter)
                    holders = state.pop(_HOLDERS, 1) - 1
                    if holders:
                        state[_HOLDERS] = holders
                    else:
                        parameter.requires_grad_(True)
        for engine, (flag, put_back) in zip(self.engines, flags, strict=True):
            engine.restore(flag)
            put_back()


@contextmanager
def weightless(engines: Sequence[Engine], leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """A context in which gradients are replaced by zeros, which `loss * 0` would not do for an inf or a NaN.

    Where there was no gradient, the engine takes note: what only replays have used counts as unused. One that holds
    gradients inside sees to that by itself.
    """
    handles = [leaf.register_hook(_zeros) for leaf in leaves if leaf.requires_grad]
    for engine in engines:
        engine.replays = True
        unused = () if engine.holds_inside else engine.unused()
        handles += [parameter.register_post_accumulate_grad_hook(engine.note_replayed) for parameter in unused]
    try:
        yield
    finally:
        for engine in engines:
            engine.replays = False
        for handle in handles:
            handle.remove()


def _zeros(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else torch.zeros_like(gradient)
