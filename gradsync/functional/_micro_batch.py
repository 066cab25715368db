"""One micro-batch on its engines: held from before its forward, synchronised by its backward if it is the boundary."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd import Variable, profiler

from gradsync.functional._lost import is_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from gradsync.engines import Engine, Table


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

    def __init__(self, engines: Sequence[Holdable], *, shards: bool = False) -> None:
        self._engines = engines
        # `shards`: what shares shards with this rank may reduce, and only what is replicated elsewhere is held.
        self._holds = [getattr(engine, "hold_shards", engine.hold) if shards else engine.hold for engine in engines]
        self._found: list[list[Any]] = []

    def __enter__(self) -> None:
        if self._engines:
            self._found.append([hold() for hold in self._holds])

    def __exit__(self, *_: object) -> None:
        if self._engines:
            for engine, found in zip(self._engines, self._found.pop(), strict=True):
                engine.restore(found)


def backward(
    loss: torch.Tensor,
    engines: Sequence[Engine],
    *,
    seed: torch.Tensor | None = None,
    size: int,
    last: bool,
    early: bool = False,
    table: Table = (),
) -> Table:
    """The backward of `loss` inside a `Hold`; if it is the `last` of its window, it synchronises the window.

    `early` synchronises whichever it is: averaging once more what is equal already changes nothing.

    `seed` is the gradient to begin with, 1 by default. `size` is what the window was planned to have. An exception
    goes on after the collectives that the backward began are complete, so that no other rank waits for this one.
    Returns `table` summed over the ranks.
    """
    order = _order(engines, size=1 if early else size, last=last or early)
    if not order.armed and not order.again:
        loss.backward(seed)
        return table
    sent = _begin(engines, order, loss, table)
    try:
        loss.backward(seed)
    except BaseException as error:
        if not is_lost(error):  # else nobody is there to complete anything with
            _abort(order, table)
        raise
    return _complete(order, sent, table)


class _Order(NamedTuple):
    """In which order engines synchronise a micro-batch: the same on every rank, whatever its backward reaches."""

    armed: Sequence[Engine]  # in the backward, or right after it if that does not reach them
    after: Sequence[Engine]  # in turn, after those
    again: Sequence[Engine]  # all, once more: then the table goes along with that

    def riding(self, table: Table) -> Table:
        """What of `table` goes along with those in the backward and right after it."""
        return () if self.again else table


def _order(engines: Sequence[Engine], *, size: int, last: bool) -> _Order:
    """Who synchronises when.

    An engine that owes a synchronisation of its very first micro-batch makes that in the backward, and in a window
    planned for more than one a second at its end. Where that first one is the last as well, it still makes two: on
    other ranks it may not be the last.

    Of several engines only the first synchronises in the backward, and the others in turn after it: backward reaches
    them in an order of its own, which another rank, whose micro-batch uses another model or that has none at all,
    cannot know. Where a forward communicates, every rank runs it, and the backward too.
    """
    owing = [engine for engine in engines if engine.owes_first]
    if not last:
        return _Order(owing, (), ())
    if owing and (size > 1 or len(engines) > 1):
        return _Order(owing, (), engines)
    if any(engine.forward_communicates for engine in engines):
        return _Order(engines, (), ())
    return _Order(engines[:1], engines[1:], ())


def _begin(
    engines: Sequence[Engine], order: _Order, loss: torch.Tensor | None, table: Table
) -> tuple[torch.Tensor, Any] | None:
    """Before the backward, or as it begins; returns what `_complete` has to wait for."""
    sent = _send(engines, order.riding(table))
    for engine in order.armed:
        engine.arm(loss)
    return sent


def _complete(order: _Order, sent: tuple[torch.Tensor, Any] | None, table: Table) -> Table:
    """After the backward: whatever it has left. Returns `table` summed over the ranks."""
    riding = order.riding(table)
    carried = [engine.settle(riding) for engine in order.armed]
    carried += [engine.reduce(riding) for engine in order.after]
    return reduce(order.again, table) if order.again else _receive(sent, carried, riding)


def _abort(order: _Order, table: Table) -> None:
    """Complete the collectives of a backward that failed; what goes wrong here must not hide why it did."""
    riding = order.riding(table)
    todo: list[Callable[[], object]] = [partial(engine.abort, riding) for engine in order.armed]
    todo += [partial(engine.reduce, riding) for engine in order.after]
    if order.again:
        todo.append(partial(reduce, order.again, table))
    for complete in todo:
        try:
            complete()
        except Exception as second:  # noqa: BLE001, PERF203 - whatever it is, the first error goes on
            if is_lost(second):
                return  # each further wait could last for the group's time-out


class Joined:
    """What `backward` does, in one that has begun already from an unknown loss; `done(table)` at its end."""

    __slots__ = ("_done", "_order", "_sent", "_table", "ended", "waits")

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        size: int,
        last: bool,
        table: Table,
        done: Callable[[Table], None],
    ) -> None:
        self._order = _order(engines, size=size, last=last)
        self._table = table
        self._done = done
        self.waits = False  # whether all of its gradients are there, and only other ranks can be missing
        self.ended = False
        self._sent = _begin(engines, self._order, None, table)
        # Twice over: the reducer queues its own end when its last bucket leaves, and ours must come after that.
        Variable._execution_engine.queue_callback(self._arrived)

    def abort(self) -> None:
        """It has failed, or been left: complete the collectives that it began."""
        if not self.ended:
            self.ended = True
            _abort(self._order, self._table)

    def _arrived(self) -> None:
        self.waits = True
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._done(_complete(self._order, self._sent, self._table))
        self.ended = True


def reduce(engines: Sequence[Engine], table: Table = ()) -> Table:
    """Synchronise what is accumulated, without a backward; the other ranks may be in theirs."""
    with named_range("gradsync.sync"):
        sent = _send(engines, table)
        return _receive(sent, [engine.reduce(table) for engine in engines], table)


def exchange(engines: Sequence[Engine], table: Table) -> Table:
    """`table` summed over the ranks, on its own."""
    numbers = torch.tensor(table, dtype=torch.float64, device=engines[0].parameters[0].device)
    dist.all_reduce(numbers, group=engines[0].group)
    return numbers.tolist()


def _send(engines: Sequence[Engine], table: Table) -> tuple[torch.Tensor, Any] | None:
    """Put the table on its way, before the gradients, unless an engine takes it along with them."""
    if not table or not engines or any(engine.carries for engine in engines):
        return None
    numbers = torch.tensor(table, dtype=torch.float64, device=engines[0].parameters[0].device)
    return numbers, dist.all_reduce(numbers, group=engines[0].group, async_op=True)


def _receive(sent: tuple[torch.Tensor, Any] | None, carried: Sequence[Table | None], table: Table) -> Table:
    if sent is not None:
        numbers, work = sent
        work.wait()
        return numbers.tolist()
    return next((came for came in carried if came is not None), table)


class _NoRange:
    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NO_RANGE = _NoRange()


def named_range(name: str) -> AbstractContextManager[Any]:
    """A range of that name in torch.profiler; free while none runs (`record_function` alone costs 5 us)."""
    if profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return _NO_RANGE
