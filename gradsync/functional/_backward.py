"""The backward of a micro-batch on its engines: held, or with the synchronisation of a boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.autograd import Variable, profiler

from gradsync._errors import GradSyncError
from gradsync.engines import in_our_words
from gradsync.ranks.lost import is_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from gradsync.engines import Engine

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

    __slots__ = ("_engines", "_found", "_holds")

    def __init__(self, engines: Sequence[Holdable], sync: str = "window") -> None:
        self._engines = engines
        # "shard": gradients are reduced among the ranks of a shard group; the all-reduce across replicas is held.
        how = "hold_shards" if sync == "shard" else "hold"
        self._holds = [getattr(engine, how, engine.hold) for engine in engines]
        self._found: list[list[Any]] = []

    def __enter__(self) -> None:
        if self._engines:
            self._found.append([hold() for hold in self._holds])

    def __exit__(self, *_: object) -> None:
        if self._engines:
            for engine, found in zip(self._engines, self._found.pop(), strict=True):
                engine.restore(found)


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
            loss.backward(seed)
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


class Order(NamedTuple):
    """In which order engines synchronise: the same on every rank, whatever parameters its backward reaches."""

    armed: Sequence[Engine] = ()  # in the backward, or right after it if it does not reach them
    after: Sequence[Engine] = ()  # after those, one after another
    again: Sequence[Engine] = ()  # all engines, once more
    between: Callable[[], object] = bool  # called right before `again`

    def __bool__(self) -> bool:
        return bool(self.armed or self.again)

    @classmethod
    def of_held(cls, engines: Sequence[Engine]) -> Order:
        """The order of a held micro-batch: nothing, but for the very first one of a static graph."""
        owing = [engine for engine in engines if engine.owes_first]
        return cls(owing) if owing else HELD

    @classmethod
    def of_boundary(cls, engines: Sequence[Engine], size: int) -> Order:
        """The order at the boundary of a window that is planned for `size` micro-batches.

        An engine with a static graph must synchronise in the backward of its very first micro-batch. In a window of
        more than one micro-batch, it synchronises a second time, at the boundary. It does so even if the first
        micro-batch here is also the last: on other ranks it may not be the last.

        Of several engines, the first synchronises in the backward, and the others after it, one after another. The
        backward reaches engines in an order that other ranks do not know: their micro-batches may use other models, or
        they have none. Where a forward communicates, every rank runs it, and all engines synchronise in the backward.
        """
        if not engines:
            return HELD
        owing = [engine for engine in engines if engine.owes_first]
        if owing and (size > 1 or len(engines) > 1):
            return cls(owing, (), engines)
        if any(engine.forward_communicates for engine in engines):
            return cls(engines)
        return cls(engines[:1], engines[1:])

    def complete(self) -> None:
        """After the backward: synchronise what it has not."""
        for engine in self.armed:
            engine.settle()
        for engine in self.after:
            engine.reduce()
        if self.again:
            self.between()
            reduce(self.again)

    def abort(self) -> None:
        """Complete the collectives of a backward that failed. Errors in here are dropped: the first error goes on."""
        todo: list[Callable[[], object]] = [engine.abort for engine in self.armed]
        todo += [engine.reduce for engine in self.after]
        todo += [self.between, *(engine.reduce for engine in self.again)]
        for complete in todo:
            try:
                complete()
            except Exception as second:  # noqa: BLE001, PERF203 - the first error goes on
                if is_lost(second):
                    return  # each further wait could last for the group's time-out


HELD = Order()  # no engine synchronises


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


def reduce(engines: Sequence[Engine]) -> None:
    """Synchronise what is accumulated, without a backward. The other ranks may run a backward meanwhile."""
    with named_range("gradsync.sync"):
        for engine in engines:
            engine.reduce()


class _NoRange:
    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


NO_RANGE = _NoRange()


class Both:
    """Context manager: `inner` inside `outer`."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, where)
        self._outer.__exit__(kind, error, where)


def named_range(name: str) -> AbstractContextManager[Any]:
    """A range of this name in torch.profiler. Free if no profiler runs (`record_function` alone costs 5 us)."""
    if profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return NO_RANGE
