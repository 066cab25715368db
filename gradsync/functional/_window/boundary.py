"""The two kinds of places: `Boundary`, the last of a window, where all engines synchronise; `Held`, where mostly none.

Both are context managers around the backward, which arms the engines of their `order`. An error of a type in `skip`
is not let through. Afterwards `closing` has what came to the window; in a held place it is None. `Transport` is how the
gradients travel to the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from typing_extensions import Self

from gradsync._loss import SUMS
from gradsync.engines import clarify
from gradsync.functional._team.backward import HELD, Order
from gradsync.functional._team.team import Team
from gradsync.functional._window.closing import Closing, factor_of
from gradsync.functional._window.exchange import Exchange, alike
from gradsync.functional._window.share import Share
from gradsync.functional._window.window import Window
from gradsync.ranks.lost import WaitingFor, is_lost, lost
from gradsync.ranks.tables import Sent


class Transport:
    """How the gradients of a run's windows travel to the other ranks: here, the engines' own way."""

    #: Whether a window closes before its gradients have arrived. Then nothing waits for what was sent after them.
    closes_before = False

    def check(self, team: Team) -> None:
        """Raise for a team whose gradients cannot travel this way. Asked when a window opens."""

    def carry(self, window: Window) -> None:
        """The gradients of a window are about to synchronise."""

    def carried(self, window: Window) -> None:
        """They have, or have failed to."""


class Held:
    """A held place. No engine synchronises, except on FSDP with `sync="each"`, or in a static graph's first one."""

    __slots__ = ("_run", "_window", "order")
    closing: Closing | None = None  # what came to the window, once that is known

    def __init__(self, run: Any, order: Order) -> None:
        self.order = order
        self._run = run
        self._window: Window = run.window

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        failure = error
        if error is not None:
            if not is_lost(error):  # else a rank is gone: collectives would only hang
                self.order.abort()
        elif self.order is not HELD:
            try:
                self.order.complete()
            except BaseException as late:  # noqa: BLE001 - it goes on, below
                failure = late
        if failure is None:
            self._end()
            return False
        drops = self._drops(failure)
        if error is None and not drops:
            raise failure
        return drops

    def _end(self) -> None:
        """After the backward, and what the engines had to synchronise."""
        self._window.index += 1

    def _drops(self, failure: BaseException) -> bool:
        """After a failure. Returns whether it only drops the window, on all ranks."""
        self._window.index += 1
        if is_lost(failure):
            raise lost(failure, self._window.what()) from failure
        if self.order is not HELD:
            clarify(failure)
        return bool(self._run.terms.skips(failure) and self._window.fail())


class Boundary(Held):
    """The last place of a window: the table leaves, gradients synchronise, buffers are made equal."""

    def __init__(self, run: Any, order: Order) -> None:
        # The table leaves before the backward; if engines synchronise twice (a static graph), between these.
        super().__init__(run, order._replace(between=self._send) if order.again else order)
        self._exchange: Exchange = run.exchange
        self._sent: Sent | None = None
        self._failed = False  # whether the backward did
        self._shares: Sequence[Share] | None = None  # of all ranks, once the table has arrived
        self._due: Sequence[bool] = ()  # of which ranks a micro-batch was expected; empty on one rank
        self._arrivals: Sequence[Callable[[], None]] = ()  # wait for buffers that left before the backward

    def __enter__(self) -> Self:
        with WaitingFor(self._window.what):
            if not self.order.again:
                self._send()
            self._run.transport.carry(self._window)
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> bool:
        with WaitingFor(self._window.what):
            try:
                return super().__exit__(kind, error, where)
            finally:
                self._run.transport.carried(self._window)

    def _end(self) -> None:
        self._note(self._close())

    def _drops(self, failure: BaseException) -> bool:
        """After a failure, run the window's other collectives, as the other ranks do after their backward."""
        closing = None
        if not is_lost(failure):
            self._failed = True
            with suppress(Exception):  # the first error goes on
                closing = self._close().without_factor()
        if not super()._drops(failure) or closing is None:
            return False
        self._note(closing)
        return True

    def _note(self, closing: Closing) -> None:
        self.closing = closing
        self._window.has_synchronised = True
        if closing.factor is None:  # no update will use them
            self._window.team.drop_gradients()

    def _close(self) -> Closing:
        """After the gradients are synchronised: read the table, make the buffers equal, hear of failures."""
        window, team = self._window, self._window.team
        shares = self._hear()
        # One rank sends no table: in a loop, or with counts, its own share says all that the table would.
        told = self._sent is not None or self._run.always_sends or window.kind == SUMS
        factor = factor_of(shares, self._run.terms.tail)
        closing = Closing(tuple(shares), team.rank, factor, told, window.losses, window.count)
        if self._due:
            self._make_buffers_equal()
        if not self._run.terms.skip or team.num_ranks == 1:
            return closing
        closing = closing._replace(failures=team.tables.send([float(window.failed or self._failed)]))
        return closing if self._run.transport.closes_before or not closing.has_failed else closing.without_factor()

    def _send(self) -> None:
        window, run = self._window, self._run
        if window.team.num_ranks == 1:
            return
        self._due = self._exchange.due(run)
        self._sent = window.heard if window.heard is not None else self._exchange.send(run)
        if run.transport.closes_before:
            # This waits for the table only if rank 0 may have no micro-batch.
            source = 0 if self._due[0] else self._source_of_buffers()
            self._arrivals = [engine.send_buffers(source) for engine in window.active]

    def _hear(self) -> Sequence[Share]:
        """The shares of all ranks. Waits for tables, and for no backward."""
        if self._shares is None:
            sent, hear = self._sent, self._exchange.hear
            self._shares = alike(self._window) if sent is None else hear(self._run, sent)
        return self._shares

    def _make_buffers_equal(self) -> None:
        """After the backward: send buffers, or wait for those that were sent before it."""
        if self._run.transport.closes_before:
            for arrive in self._arrivals:
                arrive()
        else:
            source = self._source_of_buffers()
            for engine in self._window.active:
                engine.share_buffers(source)

    def _source_of_buffers(self) -> int:
        """The lowest rank that had a micro-batch, or was expected to: all ranks get its buffers."""
        there = (rank for rank, share in enumerate(self._hear()) if share.num_calls or self._due[rank])
        return next(there, 0)
