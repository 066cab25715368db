"""The backward of a micro-batch on its engines: held, or with the synchronisation of a boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch.autograd import Variable, graph

from gradsync._errors import GradSyncError
from gradsync.engines import in_our_words
from gradsync.functional._order import HELD, Order
from gradsync.ranks.lost import is_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


RunBackward: TypeAlias = "Callable[[torch.Tensor], object]"
"""Runs a backward in place of `loss.backward()`: `accelerator.backward`, `fabric.backward`."""


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


def backward(
    loss: torch.Tensor, order: Order, *, seed: torch.Tensor | None = None, run: RunBackward | None = None
) -> None:
    """Run the backward of `loss` inside a `Hold`; the engines of `order` synchronise in it and after it.

    `seed` is the gradient to begin with, 1 by default; `run` runs the backward, `loss.backward` by default. If it
    raises, the collectives that it began are completed first, so that no other rank waits for this rank.
    """
    for engine in order.armed:
        engine.arm(loss)
    try:
        if run is None:
            _run(loss, seed)
        else:
            _insist(run, loss if seed is None else loss * seed)
    except BaseException as error:
        if order is not HELD and not is_lost(error):  # a lost rank completes nothing
            order.abort()
            told = in_our_words(error)
            if told is not None:
                raise told from error
        raise
    if order is not HELD:
        order.complete()


def _run(loss: torch.Tensor, seed: torch.Tensor | None) -> None:
    """What `loss.backward(seed)` does, without its checks of the seed, which is ours; they cost a fifth of the call.

    `_engine_run_backward` is private in torch; without it, and for a subclass of tensors, `backward` is called.
    """
    run = getattr(graph, "_engine_run_backward", None)
    if seed is None or run is None or type(loss) is not torch.Tensor:
        loss.backward(seed)
    else:
        run((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _insist(run: RunBackward, loss: torch.Tensor) -> None:
    """Let `run` run the backward; raise if it did not."""
    who = getattr(run, "__self__", None)
    steps = getattr(who, "gradient_accumulation_steps", 1)
    if steps != 1:
        raise GradSyncError(
            f"What is given as run= must run the backward of the loss as it is, but this {type(who).__name__} divides "
            f"it by its gradient_accumulation_steps, which are {steps}, and gradsync divides already. Make it with "
            "gradient_accumulation_steps=1."
        )
    came: list[None] = []
    watch = loss.register_hook(lambda _: came.append(None))
    try:
        run(loss)
    finally:
        watch.remove()
    if not came:
        raise GradSyncError(
            f"What is given as run= must run the backward of the loss that it is called with, but {run!r} returned and "
            "no backward had come to that loss. Pass accelerator.backward or fabric.backward, or leave run= out."
        )


class Joined:
    """Synchronises in a backward of the user's that has begun already; `done()` is called at its end."""

    __slots__ = ("_done", "_failed", "_has_ended", "_order", "_reached", "_waits")

    def __init__(
        self, order: Order, reached: set[int], done: Callable[[], None], failed: Callable[[], object] | None
    ) -> None:
        """`reached` has the ids of the leaves that the backward has come to; `failed` is called if it fails."""
        self._order = order
        self._reached = reached
        self._done = done
        self._failed = failed
        self._waits = False  # whether all gradients are there, so that it can only wait for other ranks
        self._has_ended = False
        for engine in order.armed:
            engine.arm(None)
        # Queued twice: the reducer queues its own callback when its last bucket leaves, and ours must come after it.
        Variable._execution_engine.queue_callback(self._arrived)

    def over(self) -> bool:
        """After the backward: complete the collectives if it failed; returns whether it failed waiting for ranks."""
        if self._has_ended or self._waits:
            return not self._has_ended
        self._has_ended = True
        self._note_visits()
        self._order.abort()
        if self._failed is not None:
            self._failed()
        return False

    def _arrived(self) -> None:
        self._waits = True
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._note_visits()
        self._order.complete()
        self._has_ended = True
        self._done()

    def _note_visits(self) -> None:
        for engine in self._order.armed:
            if not self._reached.isdisjoint(map(id, engine.leaves)):
                engine.note_visit()
