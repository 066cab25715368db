"""A loop over data that ends: on other ranks perhaps later, whose windows this one then takes part in."""

from __future__ import annotations

import math
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from gradsync._errors import GradSyncError
from gradsync.functional._exchange import alike
from gradsync.functional._place import Part
from gradsync.functional._share import NOBODY, Share
from gradsync.ranks.line import device_of
from gradsync.ranks.lost import WaitingFor
from gradsync.ranks.meet import ONE_FORWARD, agreed, meet_with_data, nothing_here, ranks_where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gradsync.functional._place import Place
    from gradsync.functional._run import Run
    from gradsync.functional._team import Team
    from gradsync.functional._window import Window
    from gradsync.ranks.line import Sent

_PERHAPS = 0.5  # an item, in place of items left
_ASKS = -1.0  # in place of items left: what the window is that closes, this rank has to be told


class Turn(NamedTuple):
    """A place that this rank takes in a window of the others, after its own data has ended."""

    run: Run
    place: Place


class _Lane:
    """What a loop is to one of its runs, and what the run's share of a window travels by: always in a table."""

    is_of_ends = True

    def __init__(self, loop: Loop, run: Run) -> None:
        self._loop = loop
        self._run = run

    def enter(self) -> None:
        self._loop.enter(self._run)

    def ends(self) -> bool:
        return self._loop.ends(self._run)

    def plan(self, window: Window) -> None:
        self._loop.plan(self._run, window)

    def send(self, window: Window) -> Sent | None:
        if window.team.num_ranks == 1:
            return None
        return window.team.line.send(self._loop.share(self._run, window).row())

    def shares(self, window: Window, sent: Sent | None) -> list[Share]:
        return alike(window) if sent is None else self._loop.hear(self._run, window, sent)

    @property
    def due(self) -> Sequence[bool]:
        return self._loop.due


class Loop:
    """What the calls in a loop share: how far its data is, and what the ranks have said of theirs."""

    def __init__(self, name: str, length: int | None, runs: Callable[[], Sequence[Run]] = list) -> None:
        """`runs` are those that may be called in the loop, as far as this rank knows them."""
        self.name = name
        self.thread = get_ident()
        self.num_items = 0
        self.num_calls = 0
        self.num_idle = 0  # items that no call came for
        self.is_superseded = False  # whether another loop of the same calls began before this one had ended
        self.called_from: object = None  # where the last call came from, if items have been idle
        self.kept: dict[Run, Any] = {}  # what the last calls are made of, alive as long as the loop is
        self.called: list[Run] = []  # in the order of their first call
        self._length = length
        self._runs = runs
        self._is_last = False  # whether the current item is the last
        self._has_ended = False
        self._told_end: set[Run] = set()  # whose last window has closed, as the ranks know
        self._calls: dict[Run, int] = {}  # for the current item,
        self._most: dict[Run, int] = {}  # and the most for one before it
        self._chief: Run | None = None  # over whose ranks the loop's tables go
        self._shares: Sequence[Share] = ()  # what the ranks said last
        self._planned: int | None = None  # calls in the open window, where ranks go in step and need not ask

    def lane(self, run: Run) -> _Lane:
        """What this loop is to one of its runs."""
        return _Lane(self, run)

    # -- this rank's data -------------------------------------------------------------------------------------------

    def draw(self, *, last: bool) -> None:
        """An item is handed out."""
        self._finish_item()
        self.num_items += 1
        self._is_last = last

    def left(self, run: Run) -> float:
        """How many items are still to come; inf where that is not known, and a part of one if a call may come."""
        if self._is_last:
            return 0.0 if self._has_ended or self._calls_once(run) else _PERHAPS
        return math.inf if self._length is None else float(max(0, self._length - self.num_items))

    def calls_once(self, run: Run) -> None:
        """It is known to be called once an item."""
        self._most[run] = 1

    def enter(self, run: Run) -> None:
        """A call begins, and opens a window if none is open."""
        if run in self._told_end and self._team.num_ranks > 1:
            raise GradSyncError(
                f"Each item of {self.name} has had one call, and so the call for the last item has closed the last "
                "window, on all ranks; but one more call came for it. Make as many calls for each item, or call after "
                "the loop."
            )
        self.num_calls += 1
        self._calls[run] = self._calls.get(run, 0) + 1
        if run not in self.called:
            if self._chief is None:
                run.fit()
                self._meet(run)
            elif run.team is None and self._team.num_ranks > 1:
                self._announce(run)
            self.called.append(run)
        if run.window is None:
            run.open(run.fit())

    def ends(self, run: Run) -> bool:
        """Whether the call that has begun is the last of all, on every rank where these go in step."""
        ends = self._is_last and self._calls_once(run) and self._calls[run] == 1
        if self._in_step:
            window = run.window
            assert window is not None, "opened before"
            if self._planned is not None:
                ends = window.index + 1 >= self._planned
            else:
                left = 0.0 if ends else max(1.0, self.left(run))
                size = float(window.size)
                ends = not any(s.left for s in self._ask(Share(closing=float(run.key), left=left, size=size)))
        return ends and run.terms.tail != "carry"

    def _calls_once(self, run: Run) -> bool:
        """Whether the loop has been seen to call it once an item, and never more often."""
        return self._most.get(run) == 1 and self._calls.get(run, 0) <= 1

    def _finish_item(self) -> None:
        self.num_idle += not self._calls and self.num_items > 0
        for run, calls in self._calls.items():
            self._most[run] = max(self._most.get(run, 0), calls)
        self._calls.clear()

    # -- all ranks --------------------------------------------------------------------------------------------------

    @property
    def due(self) -> Sequence[bool]:
        """Which ranks are to have a micro-batch in the window that closes next, as all said in the table before."""
        return [share.left > 0 for share in self._shares]

    def share(self, run: Run, window: Window) -> Share:
        """What this rank says of a window that it closes."""
        once, left = float(self._calls_once(run)), self.left(run)
        if left == 0:
            self._told_end.add(run)
        return window.share(closing=float(run.key), opened=self._first_open(), left=left, once=once)

    def hear(self, run: Run, window: Window, sent: Sent) -> list[Share]:
        """What the ranks have said of a window that closes."""
        shares = [Share.of(row) for row in sent.rows()]
        self._check_same(shares)
        if any(share.left == _ASKS for share in shares):
            # A rank whose data has ended, and that has several windows open, did not know which one it is.
            mine = self.share(run, window)
            shares = [Share.of(row) for row in self._send(mine).rows()]
        self._shares = shares
        return shares

    def plan(self, run: Run, window: Window) -> None:
        """A window opens."""
        lefts = [share.left for share in self._shares]
        self._planned = None
        if (
            self._in_step
            and not callable(run.terms.steps)
            and len(self.called) <= 1
            and len(self._runs()) <= 1
            and not any(left % 1 for left in lefts)
        ):
            if max(lefts) >= window.size:
                self._planned = window.size
            elif max(lefts) and all(share.once or not share.left for share in self._shares):
                self._planned = int(max(lefts))
        if self._planned is not None and run.terms.tail == "carry":
            self._planned = window.size if self._planned == window.size else None

    def rest(self) -> Iterator[Turn]:
        """The places that this rank takes after its own data has ended: to close what is open, and with the others.

        Whoever gets one runs, repeats or misses it before asking for the next.
        """
        self._finish_item()
        self._is_last = self._has_ended = True
        if self._chief is None and not self._meet_without_item():
            yield from self._close_alone()
            return
        if self._team.num_ranks == 1:
            yield from self._close_alone()
            return
        with WaitingFor(lambda: f"the windows of {self.name} that other ranks may still have"):
            while not self._all_know_the_end:
                turn = self._next_in_step() if self._in_step else self._next()
                if turn is None:
                    return
                yield turn

    @property
    def _all_know_the_end(self) -> bool:
        """Whether the ranks have told each other that nothing comes any more."""
        runs = self._known()
        return (
            len(runs) == 1
            and runs[0].window is None
            and not any(share.left or share.open != NOBODY for share in self._shares)
        )

    def _close_alone(self) -> Iterator[Turn]:
        for run in self._known():
            if run.window is not None and run.terms.tail != "carry":
                yield Turn(run, replace(self._stand_in(run, Part.MISSES), last=True))

    def _next(self) -> Turn | None:
        """The next window that some rank closes, where no forward waits for others."""
        runs = self._known()
        alone = runs[0] if len(runs) == 1 else None
        mine = Share(open=self._first_open(), left=0.0 if alone else _ASKS)
        if alone is not None and alone.window is not None:
            mine = alone.window.share(opened=self._first_open())
        sent = self._send(mine)
        closing = self._closing([Share.of(row) for row in sent.rows()])
        if closing is None:
            return None
        place = replace(self._stand_in(closing, Part.MISSES), last=True)
        closing.heard(sent)
        return Turn(closing, place)

    def _closing(self, shares: Sequence[Share]) -> Run | None:
        """Whose window the ranks close next, or whose call they are in; None if all have ended, and none is open."""
        closing = max(share.closing for share in shares)
        opened = [share.open for share in shares if share.open != NOBODY]
        if closing == NOBODY and not opened:
            return None
        return self._run_of(min(opened) if closing == NOBODY else closing, shares)

    def _stand_in(self, run: Run, part: Part) -> Place:
        return run.stand_in(self.lane(run), part)

    def _next_in_step(self) -> Turn | None:
        """The next call of the other ranks, where forwards wait for each other."""
        run = self._chief
        assert run is not None, "they have met"
        if run.window is None and len(self._known()) == 1 and any(share.left for share in self._shares):
            self._stand_in(run, Part.REPEATS)  # opens it, and with that plans it
        if run.window is not None and self._planned is not None:
            last = run.index + 1 >= self._planned
            return Turn(run, replace(self._stand_in(run, self._part(run)), last=last))
        shares = self._ask(Share(open=self._first_open()))
        called = self._closing(shares)
        if called is None:
            for other in self._known():
                if other.window is not None and not other.window.index:
                    other.discard()  # opened for a window that did not come
            return None
        if all(share.closing == NOBODY for share in shares):
            return Turn(called, replace(self._stand_in(called, Part.MISSES), last=True))
        size = max(share.size for share in shares)
        place = self._stand_in(called, self._part(called))
        nobody_left = not any(share.left for share in shares) and called.terms.tail != "carry"
        return Turn(called, replace(place, last=place.index + 1 >= size or nobody_left))

    @staticmethod
    def _part(run: Run) -> Part:
        return Part.REPEATS if run.fit().forward_communicates else Part.MISSES

    # -- meetings ---------------------------------------------------------------------------------------------------

    def _meet(self, run: Run) -> None:
        """Hear at the first call, or at the end of the data, which ranks have anything at all."""
        team = run.fit()
        self._chief = run
        here = self.left(run) + (not self._has_ended)
        said = meet_with_data(
            team.group,
            team.twins,
            f"the data of {self.name}",
            {
                "windows": {str(one.key): one.in_words() for one in {*self._known(), run}},
                "items": self._length,
                "left": None if math.isinf(here) else here,
                "open": run.index,
                "once": self._calls_once(run),
                "can repeat": not self._has_ended or run.can_repeat,
            },
        )
        insist_on_windows([one["windows"] for one in said])
        self._shares = [
            Share(
                left=math.inf if one["left"] is None else one["left"],
                once=float(one["once"]),
                open=one["open"] or NOBODY,
            )
            for one in said
        ]
        anything = any(share.left for share in self._shares) or any(one["open"] for one in said)
        owes = any(engine.owes_first for engine in team.engines)  # whose very first micro-batch takes all ranks
        if anything and (team.forward_communicates or owes or run.terms.repeats == "always"):
            check_repeats([one["can repeat"] for one in said], self.name)
        if team.has_sync_batchnorm and team.num_ranks > 1:
            check_lengths([one["items"] for one in said], self.name)

    def _meet_without_item(self) -> bool:
        """No call has come in this loop; returns whether there are other ranks to go on with."""
        runs = self._known()
        if not runs:
            nothing_here(f"the data of {self.name}")
            return False
        run = next((run for run in runs if run.window is not None), runs[0])
        if run.fit().num_ranks == 1:
            return False
        self._meet(run)
        return True

    def _known(self) -> list[Run]:
        """The windows that the loop may come to, as far as this rank knows: the same order on all ranks."""
        return sorted({run.key: run for run in (*self._runs(), *self.called)}.values(), key=lambda run: run.key)

    def _announce(self, run: Run) -> None:
        """A window of a new kind is to be opened, which takes all ranks."""
        shares = self._ask(Share(closing=float(run.key), left=1.0))
        absent = ranks_where(share.closing == NOBODY for share in shares)
        if absent:
            raise GradSyncError(_NO_ITEM.format(name=self.name, ranks=absent))
        self._check_same(shares)

    def _run_of(self, key: float, shares: Sequence[Share]) -> Run:
        run = next((run for run in self._known() if run.key == key), None)
        if run is None:
            absent = ranks_where(share.closing == NOBODY for share in shares)
            raise GradSyncError(_NO_ITEM.format(name=self.name, ranks=absent))
        return run

    def _first_open(self) -> float:
        """The first of this loop's windows that is open here, and is to be closed as the data ends."""
        opened = [run.key for run in self._known() if run.index and run.terms.tail != "carry"]
        return float(min(opened)) if opened and self._has_ended else NOBODY

    def _send(self, share: Share) -> Sent:
        return self._team.line.send(share.row())

    def _ask(self, share: Share) -> list[Share]:
        """What all ranks say before a micro-batch whose forward communicates: whether they run it, and have more."""
        team = self._team
        differ = [twins_differ(group, share, team.parameters) for group in team.twins]
        shares = [Share.of(row) for row in self._send(replace(share, failed=float(any(differ)))).rows()]
        apart = ranks_where(bool(share.failed) for share in shares)
        if apart:
            raise GradSyncError(
                "All ranks of a tensor-parallel group must come to the same micro-batches, but those of data-parallel "
                f"rank {apart} do not: some have one, or more of them, and others not. {ONE_FORWARD}"
            )
        self._check_same(shares)
        return shares

    @property
    def _team(self) -> Team:
        assert self._chief is not None, "they have met"
        assert self._chief.team is not None, "they have met"
        return self._chief.team

    def _check_same(self, shares: Sequence[Share]) -> None:
        """Raise on every rank if ranks close windows of different functions, models or optimizers."""
        closing = {share.closing for share in shares if share.closing != NOBODY}
        if len(closing) > 1:
            raise GradSyncError(
                f"All ranks must come to the same windows of {self.name} in the same order, but "
                + ", ".join(
                    f"rank {r} is at number {int(s.closing)}" for r, s in enumerate(shares) if s.closing != NOBODY
                )
                + " of those that the loop calls. Call the functions in one order on all ranks."
            )

    @property
    def _in_step(self) -> bool:
        """Whether the ranks take each call together: then all windows of the loop do."""
        runs = self.called if self._chief is None else [*self.called, self._chief]
        return any(run.team is not None and run.team.in_step for run in runs)


_NO_ITEM = (
    "Every rank needs an item in {name} where a window of another function, model or optimizer is opened in the middle "
    "of it, but rank {ranks} had run out by then. Give each rank an item that calls it, or name the models and "
    "optimizers."
)


def twins_differ(group: dist.ProcessGroup, share: Share, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether ranks that run one forward together say different things."""
    said = torch.tensor([float(share.left > 0), float(share.closing != NOBODY)], device=device_of(group, parameters))
    dist.all_reduce(said, group=group)
    return any(number not in {0, group.size()} for number in said.tolist())


def insist_on_windows(said: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Raise on every rank if ranks that know a function say different things of its windows."""
    for name in dict.fromkeys(name for words in said for name in words):
        knowing = [(rank, words[name]) for rank, words in enumerate(said) if name in words]
        for key in knowing[0][1]:
            agreed([(rank, words[key]) for rank, words in knowing], key)


def check_repeats(can_repeat: Sequence[bool], name: str) -> None:
    """Raise if a rank would have to repeat a call that it never made."""
    cannot = ranks_where(not can for can in can_repeat)
    if cannot:
        raise GradSyncError(
            f"Every rank needs at least one item in {name} where the engine's forward communicates, or the loop's body "
            f"goes on, to repeat its call with when it has run out, but rank {cannot} has none. Give each rank an "
            "item, or use accumulating, whose .over needs none on DDP."
        )


def check_lengths(lengths: Sequence[int | None], name: str) -> None:
    """Raise if the ranks' lengths may differ where a forward waits for all ranks."""
    if None in lengths or len(set(lengths)) > 1:
        told = ", ".join(f"rank {rank} has {'?' if n is None else n}" for rank, n in enumerate(lengths))
        raise GradSyncError(
            f"SyncBatchNorm waits for every rank in each forward, so that all need equally many items in {name}, but "
            f"{told}. Give each rank as many, in an iterable with a length."
        )
