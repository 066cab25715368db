"""One micro-batch on its engines: held from before its forward, synchronised by its backward if it is the boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.autograd import Variable, profiler

from gradsync._errors import GradSyncError
from gradsync.ranks.lost import is_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from gradsync.engines import Engine

RunBackward: TypeAlias = "Callable[[torch.Tensor], object]"
"""What runs a backward in place of `loss.backward()`: `accelerator.backward`, `fabric.backward`."""


class Holdable(Protocol):
    """An engine, or anything else that can be held and restored."""

    def hold(self) -> Any:
        """Returns what it found."""

    def restore(self, found: Any) -> None:
        """Puts that back."""


class Hold:
    """Context manager: the gradients of backwards inside stay local. Can be entered again and again, and nested.

    A class, and one object for many micro-batches, because it runs in each of them: a generator would cost five times
    as much.
    """

    __slots__ = ("_engines", "_found", "_holds")

    def __init__(self, engines: Sequence[Holdable], sync: str = "window") -> None:
        self._engines = engines
        # "shard": what shares shards with this rank may reduce, and only what is replicated elsewhere is held.
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
    """The backward of `loss` inside a `Hold`, in which the engines of `order` synchronise.

    `seed` is the gradient to begin with, 1 by default; `run` is what runs the backward, `loss.backward` by default. An
    exception goes on after the collectives that the backward began are complete, so that no other rank waits for this
    one.
    """
    if order:
        for engine in order.armed:
            engine.arm(loss)
    try:
        if run is None:
            loss.backward(seed)
        else:
            _insist(run, loss if seed is None else loss * seed)
    except BaseException as error:
        if order and not is_lost(error):  # else nobody is there to complete anything with
            order.abort()
        raise
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
    """In which order engines synchronise a micro-batch: the same on every rank, whatever its backward reaches."""

    armed: Sequence[Engine] = ()  # in the backward, or right after it if that does not reach them
    after: Sequence[Engine] = ()  # in turn, after those
    again: Sequence[Engine] = ()  # all, once more,
    between: Callable[[], object] = bool  # and what comes right before that

    def __bool__(self) -> bool:
        return bool(self.armed or self.again)

    @classmethod
    def of_held(cls, engines: Sequence[Engine]) -> Order:
        """That of a micro-batch that is held: only a static graph's very first one synchronises."""
        return cls([engine for engine in engines if engine.owes_first])

    @classmethod
    def of_boundary(cls, engines: Sequence[Engine], size: int) -> Order:
        """That of the last micro-batch of a window that is planned for `size`.

        An engine that owes a synchronisation of its very first micro-batch makes that in the backward, and in a window
        planned for more than one a second at its end. Where that first one is the last as well, it still makes two: on
        other ranks it may not be the last.

        Of several engines only the first synchronises in the backward, and the others in turn after it: backward
        reaches them in an order of its own, which another rank, whose micro-batch uses another model or that has none
        at all, cannot know. Where a forward communicates, every rank runs it, and the backward too.
        """
        owing = [engine for engine in engines if engine.owes_first]
        if owing and (size > 1 or len(engines) > 1):
            return cls(owing, (), engines)
        if any(engine.forward_communicates for engine in engines):
            return cls(engines)
        return cls(engines[:1], engines[1:])

    def complete(self) -> None:
        """After the backward: whatever it has left."""
        for engine in self.armed:
            engine.settle()
        for engine in self.after:
            engine.reduce()
        if self.again:
            self.between()
            reduce(self.again)

    def abort(self) -> None:
        """Complete the collectives of a backward that failed; what goes wrong here must not hide why it did."""
        todo: list[Callable[[], object]] = [engine.abort for engine in self.armed]
        todo += [engine.reduce for engine in self.after]
        todo += [self.between, *(engine.reduce for engine in self.again)]
        for complete in todo:
            try:
                complete()
            except Exception as second:  # noqa: BLE001, PERF203 - whatever it is, the first error goes on
                if is_lost(second):
                    return  # each further wait could last for the group's time-out


class Joined:
    """What `backward` does, in one of somebody else's that has begun already; `done()` is called at its end."""

    __slots__ = ("_done", "_order", "_reached", "ended", "waits")

    def __init__(self, order: Order, reached: set[int], done: Callable[[], None]) -> None:
        """`reached` gets the ids of the leaves that the backward comes to."""
        self._order = order
        self._reached = reached
        self._done = done
        self.waits = False  # whether all of its gradients are there, and only other ranks can be missing
        self.ended = False
        for engine in order.armed:
            engine.arm(None)
        # Twice over: the reducer queues its own end when its last bucket leaves, and ours must come after that.
        Variable._execution_engine.queue_callback(self._arrived)

    def abort(self) -> None:
        """It has failed, or been left: complete the collectives that it began."""
        if not self.ended:
            self.ended = True
            self._note_visits()
            self._order.abort()

    def _arrived(self) -> None:
        self.waits = True
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._note_visits()
        self._order.complete()
        self.ended = True
        self._done()

    def _note_visits(self) -> None:
        for engine in self._order.armed:
            if not self._reached.isdisjoint(map(id, engine.leaves)):
                engine.note_visit()


def reduce(engines: Sequence[Engine]) -> None:
    """Synchronise what is accumulated, without a backward; the other ranks may be in theirs."""
    with named_range("gradsync.sync"):
        for engine in engines:
            engine.reduce()


class _NoRange:
    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


NO_RANGE = _NoRange()


class Both:
    """Context manager: one inside another."""

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
    """A range of that name in torch.profiler; free while none runs (`record_function` alone costs 5 us)."""
    if profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return NO_RANGE
