"""The boundary of a window: the table leaves, gradients synchronise, buffers are made equal, the closing is known."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsync.functional._closing import Closing, factor_of
from gradsync.functional._order import Order
from gradsync.functional._table import SUMS
from gradsync.ranks.lost import WaitingFor, is_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from gradsync.functional._exchange import Exchange
    from gradsync.functional._place import Place
    from gradsync.functional._table import Share
    from gradsync.functional._terms import Terms
    from gradsync.functional._transport import Transport
    from gradsync.functional._window import Window
    from gradsync.ranks.line import Sent


class Boundary:
    """The boundary of one window: `conclude` runs what synchronises, in the order of `order` or `begin`."""

    def __init__(
        self, window: Window, terms: Terms, exchange: Exchange, transport: Transport, heard: Sent | None = None
    ) -> None:
        """`heard` is the table, if the ranks have sent it already."""
        self._window = window
        self._terms = terms
        self._exchange = exchange
        self._transport = transport
        self._heard = heard
        self._sent: Sent | None = None
        self._failed = False  # whether the backward did
        self._due: Sequence[bool] = ()  # which ranks were to have a micro-batch, by rank
        self._shares: Sequence[Share] | None = None  # of all ranks, once the table has arrived
        self._arrivals: Sequence[Callable[[], None]] | None = None  # waits for buffers that have left already
        self._begun: Order | None = None  # the order that `begin` has returned
        self._carrying: AbstractContextManager[Any] | None = None  # the context that `begin` has entered

    def order(self) -> Order:
        """How the engines synchronise. The table leaves now; or, if they synchronise twice, between the two."""
        window = self._window
        order = Order.of_boundary(window.active, window.size, window.asked)
        if order.again:
            return order._replace(between=self._send)
        self._send()
        return order

    def begin(self) -> Order:
        """The same, for a backward of the caller's, after which it calls `conclude`. Enters the transport."""
        self._begun = order = self.order()
        self._carrying = carrying = ExitStack()
        carrying.enter_context(self._transport.carrying(self._window))
        return order

    def conclude(self, run: Callable[[Order], None]) -> Closing:
        """Let `run` synchronise the window; returns what came to it. An error in `skip` drops it on all ranks."""
        window = self._window
        with WaitingFor(window.what):
            try:
                with self._carrying or self._transport.carrying(window):
                    run(self._begun or self.order())
            except BaseException as error:
                closing = None if is_lost(error) else self.complete_failed()
                if closing is None or not isinstance(error, self._terms.skip):
                    raise
                window.fail(error)
                return closing
            return self.closing()

    def complete_failed(self) -> Closing | None:
        """After a backward that failed: take part in the collectives that the other ranks run after theirs."""
        self._failed = True
        with suppress(Exception):  # the first error goes on
            return self.closing().without()
        return None

    def closing(self) -> Closing:
        """After the gradients are synchronised: read the table, make the buffers equal, hear of failures."""
        window, team = self._window, self._window.team
        shares = self._hear()
        alone = team.num_ranks == 1 and (self._exchange.has_an_end or window.kind == SUMS)
        told = self._sent is not None or alone
        closing = Closing(tuple(shares), team.rank, factor_of(shares), told, window.losses, window.count)
        self._share_buffers()
        if not self._terms.skip or team.num_ranks == 1:
            return closing
        failures = team.line.send([float(window.failed or self._failed)])
        if self._transport.closes_before:
            return closing._replace(failures=failures)
        return closing.without() if any(row[0] for row in failures.rows()) else closing

    def _send(self) -> None:
        if self._window.team.num_ranks == 1:
            return
        self._due = self._exchange.due
        self._sent = self._heard if self._heard is not None else self._exchange.send(self._window)
        if self._transport.closes_before:
            source = 0 if self._lowest_is_due else self._source()
            self._arrivals = [engine.send_buffers(source) for engine in self._window.active]

    def _hear(self) -> Sequence[Share]:
        """The shares of all ranks. Waits for the table, and for nothing else."""
        if self._shares is None:
            self._shares = self._exchange.shares(self._window, self._sent)
        return self._shares

    @property
    def _lowest_is_due(self) -> bool:
        """Whether all ranks know without the table that rank 0 has a micro-batch in this window."""
        if self._due:
            return self._due[0]
        return self._heard is None and not self._exchange.has_an_end

    def _source(self) -> int:
        """The lowest rank that had a micro-batch, or was to have one: its buffers count."""
        due = self._due
        there = (r for r, share in enumerate(self._hear()) if share.num_calls or (r < len(due) and due[r]))
        return next(there, 0)

    def _share_buffers(self) -> None:
        """Give all ranks the buffers of the source."""
        if self._window.team.num_ranks == 1:
            return
        if self._arrivals is not None:
            for arrive in self._arrivals:
                arrive()
            return
        source = self._source()
        for engine in self._window.active:
            engine.share_buffers(source)


class Begun(NamedTuple):
    """A backward that the caller runs by itself: its place, how the engines synchronise in it, and its boundary."""

    place: Place
    order: Order
    boundary: Boundary | None  # None in a held place
