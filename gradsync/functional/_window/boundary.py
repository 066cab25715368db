"""The two kinds of places: `Boundary`, the last of a window, where all engines synchronise; `Held`, where mostly none.

Both are context managers around the backward, which arms the engines of their `order`. An error of a type in `skip`
is not let through. Afterwards `closing` has what came to the window; in a held place it is None. `Transport` is how the
gradients travel to the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

from typing_extensions import Self

from gradsync._loss import SUMS
from gradsync.engines import clarify
from gradsync.functional._team.backward import HELD, Order
from gradsync.functional._team.team import Team
from gradsync.functional._window.buffers_at_close import BuffersAtClose
from gradsync.functional._window.closing import Closing, factor_of
from gradsync.functional._window.exchange import Exchange
from gradsync.functional._window.share import Share
from gradsync.functional._window.terms import Terms
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
    """A held place. No engine synchronises, except with `sync="each"`, or in a static graph's first micro-batch."""

    __slots__ = ("_terms", "_window", "order")
    closing = None

    def __init__(self, window: Window, order: Order, terms: Terms) -> None:
        self.order = order
        self._window = window
        self._terms = terms

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        drops = False
        if error is not None:
            drops = self._drops(error)
        elif self.order is not HELD:
            try:
                self.order.complete()
            except Exception as failure:
                if not (self._terms.skips(failure) and self._window.fail()):
                    raise
        self._window.index += 1
        return drops

    def _drops(self, error: BaseException) -> bool:
        """After a backward that failed: complete what it began. Returns whether the error only drops the window."""
        if is_lost(error):  # a rank is gone: collectives would only hang
            raise lost(error, self._window.what()) from error
        if self.order is not HELD:
            self.order.abort()
            clarify(error)
        return self._terms.skips(error) and self._window.fail()


class Boundary:
    """The last place of a window: the table leaves, gradients synchronise, buffers are made equal."""

    def __init__(self, window: Window, order: Order, terms: Terms, exchange: Exchange, transport: Transport) -> None:
        self._window = window
        self._terms = terms
        self._exchange = exchange
        self._transport = transport
        self.closing: Closing | None = None  # what came to the window, once that is known
        self._sent: Sent | None = None
        self._failed = False  # whether the backward did
        self._shares: Sequence[Share] | None = None  # of all ranks, once the table has arrived
        self._buffers: BuffersAtClose | None = None  # None on one rank
        # The table leaves before the backward; if engines synchronise twice (a static graph), between these.
        self.order = order._replace(between=self._send) if order.again else order

    def __enter__(self) -> Self:
        with WaitingFor(self._window.what):
            if not self.order.again:
                self._send()
            self._transport.carry(self._window)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        with WaitingFor(self._window.what):
            if error is not None:
                if not is_lost(error):  # else a rank is gone: collectives would only hang
                    self.order.abort()
                return self._drops(error)
            try:
                self.order.complete()
            except BaseException as failure:
                if not self._drops(failure):
                    raise
                return False
            self._transport.carried(self._window)
            self._end(self._close())
            return False

    def _drops(self, error: BaseException) -> bool:
        """After a failure: run the window's other collectives. Returns whether the error only drops it on all ranks."""
        self._transport.carried(self._window)
        if is_lost(error):
            raise lost(error, self._window.what()) from error
        closing = self._close_failed()
        if self.order is not HELD:
            clarify(error)
        if closing is None or not (self._terms.skips(error) and self._window.fail()):
            return False
        self._end(closing)
        return True

    def _end(self, closing: Closing) -> None:
        self.closing = closing
        self._window.has_synchronised = True
        if closing.factor is None:  # no update will use them
            self._window.team.drop_gradients()

    def _close_failed(self) -> Closing | None:
        """After a backward that failed: take part in the collectives that the other ranks run after theirs."""
        self._failed = True
        with suppress(Exception):  # the first error goes on
            return self._close().without_factor()
        return None

    def _close(self) -> Closing:
        """After the gradients are synchronised: read the table, make the buffers equal, hear of failures."""
        window, team = self._window, self._window.team
        shares = self._hear()
        # One rank sends no table: in a loop, or with counts, its own share says all that the table would.
        told = self._sent is not None or self._exchange.always_sends or window.kind == SUMS
        factor = factor_of(shares, self._terms.tail)
        closing = Closing(tuple(shares), team.rank, factor, told, window.losses, window.count)
        if self._buffers is not None:
            self._buffers.share(self._hear)
        if not self._terms.skip or team.num_ranks == 1:
            return closing
        closing = closing._replace(failures=team.tables.send([float(window.failed or self._failed)]))
        return closing if self._transport.closes_before or not closing.has_failed else closing.without_factor()

    def _send(self) -> None:
        window = self._window
        if window.team.num_ranks == 1:
            return
        self._buffers = BuffersAtClose(window, self._exchange)
        self._sent = window.heard if window.heard is not None else self._exchange.send(window)
        if self._transport.closes_before:
            self._buffers.send(self._hear)

    def _hear(self) -> Sequence[Share]:
        """The shares of all ranks. Waits for tables, and for no backward."""
        if self._shares is None:
            self._shares = self._exchange.shares(self._window, self._sent)
        return self._shares


Passage: TypeAlias = Held | Boundary
