"""What a rank does in a loop after its own data has ended: it takes part in the windows of ranks that have more."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gradsync.functional._loop.lockstep_of_forwards import Lockstep, StandIn
from gradsync.functional._loop.loop_exchange import LoopExchange
from gradsync.functional._loop.talk import Talk
from gradsync.functional._window.driver import Run
from gradsync.functional._window.steps_and_tail import ends_with_data
from gradsync.functional._window.table import ASKS, NOBODY, Share
from gradsync.functional._window.window import Place, Role
from gradsync.ranks.lost import WaitingFor

ExchangeOf = Callable[[Run], LoopExchange]


def places_alone(talk: Talk, exchange: ExchangeOf) -> Iterator[StandIn]:
    """Where there are no other ranks: the places that close this rank's own open windows."""
    for run in talk.known:
        if run.window is not None and ends_with_data(run.terms.tail):
            yield StandIn(run, _last_place(run, exchange))


def places_after_data(talk: Talk, lockstep: Lockstep, exchange: ExchangeOf) -> Iterator[StandIn]:
    """The places that this rank takes, in its own open windows and in the other ranks'."""
    with WaitingFor(lambda: f"the windows of {talk.name} that other ranks may still have"):
        while not all_know_the_end(talk):
            if talk.is_in_lockstep:
                turn = lockstep.next(lambda run, role: run.stand_in(exchange(run), role))
            else:
                turn = _next(talk, exchange)
            if turn is None:
                return
            yield turn


def all_know_the_end(talk: Talk) -> bool:
    """Whether all ranks have told each other that they have no more items."""
    runs = talk.known
    nobody_has_more = not any(share.left or share.open != NOBODY for share in talk.shares)
    return len(runs) == 1 and runs[0].window is None and nobody_has_more


def _next(talk: Talk, exchange: ExchangeOf) -> StandIn | None:
    """The next window that any rank closes, where no forward communicates."""
    runs = talk.known
    alone = runs[0] if len(runs) == 1 else None
    mine = Share(left=0.0 if alone else ASKS)
    if alone is not None:
        # To make a team is collective. After a change of models, the other ranks make it as they open their window.
        alone.fitting_team()
        mine = Share(number=float(alone.number)) if alone.window is None else alone.window.share()
        mine = mine._replace(changes=exchange(alone).changes)
    sent = talk.send(mine._replace(open=talk.first_open))
    closing = talk.closing([Share.of(row) for row in sent.rows()])
    if closing is None:
        return None
    place = _last_place(closing, exchange)
    assert closing.window is not None, "opened by now"
    closing.window.heard = sent
    return StandIn(closing, place)


def _last_place(run: Run, exchange: ExchangeOf) -> Place:
    return run.stand_in(exchange(run), Role.MISSES)._replace(last=True)
