"""`Hold`: inside, engines keep the gradients of backwards local."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Holdable(Protocol):
    """An engine, or anything else that can be held and restored."""

    def hold(self) -> Any:
        """Hold gradients back; returns what `restore` needs."""

    def restore(self, found: Any) -> None:
        """Undo `hold`."""


class Hold:
    """Context manager: the gradients of backwards inside stay local. It can be entered often, and nested.

    It is a class, and one object serves many micro-batches: in each of them a generator would cost five times as much.
    """

    __slots__ = ("_found", "_pairs")

    def __init__(self, engines: Sequence[Holdable], sync: str = "window") -> None:
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
