"""`overlap`: the windows of a call whose gradients travel while the next window computes.

When a window closes, its gradients depart, and this rank goes on from a provisional update. After the m-th micro-batch
of the next window they land: the call then makes the true update, and calls `on_update`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch.nn.parallel import DistributedDataParallel

from gradsync._errors import GradSyncError
from gradsync._state import LATE
from gradsync._step_hook import stepping
from gradsync.decorator.progress import Reporter
from gradsync.decorator.settings import Settings
from gradsync.decorator.updater import NO_UPDATE, Updater
from gradsync.functional import Closing, Run, Team, Transport, Window, bare_optimizer, window_size
from gradsync.overlap import (
    LEFT,
    Flight,
    InFlight,
    check_compress,
    check_ddp,
    check_optimizers,
    check_scaler,
    depart,
    go_back,
    landing,
    step_ahead,
)
from gradsync.overlap.compress_of_bare import Compressed, travels_of
from gradsync.overlap.saved import Saved
from gradsync.ranks.lost import WaitingFor

# An attribute of a DDP, for the audit: the number of windows whose gradients travel from it.
_NUM_TRAVELLING = "_gradsync_travelling"


@dataclass(eq=False)
class _Leg:
    """A closed window whose gradients travel, and what its update needs."""

    window: Window
    closing: Closing
    flights: Sequence[Flight]
    ddps: Sequence[DistributedDataParallel]
    in_flight: InFlight = field(init=False)  # once it has departed


class LateUpdater(Updater, Transport):
    """Makes the updates of one call's windows later than their boundaries."""

    closes_before = True

    def __init__(self, run: Run, settings: Settings, reporter: Reporter) -> None:
        super().__init__(run, settings, reporter)
        run.transport = weakref.proxy(self)  # not the object, which holds the run: a circle would not be freed at once
        self._num_beside = settings.overlap  # micro-batches that run while gradients travel
        self._dtype = check_compress(settings.compress)  # in which they travel; None: in their own
        self._flights: Sequence[Flight] = ()  # of the window that closes
        self._ddps: Sequence[DistributedDataParallel] = ()
        self._legs: list[_Leg] = []  # oldest first
        self._departing: _Leg | None = None  # its gradients have left, while those of earlier windows land
        self._has_gone_back = False
        self._failure: Exception | None = None  # of an update that has landed: the next landing raises it
        self._memory: Saved | None = None  # of the last provisional step, to be used again
        LATE.add(self)

    # -- what others ask ----------------------------------------------------------------------------------------------

    @property
    def ids(self) -> frozenset[int]:
        """The ids of the parameters that gradients travel to."""
        legs = [*self._legs, self._departing] if self._departing is not None else self._legs
        return frozenset().union(*(leg.window.team.ids for leg in legs))

    def check(self, team: Team) -> None:
        """Raise on every rank if gradients cannot travel. Asked when a window opens."""
        if team.num_ranks == 1:
            return
        check_scaler(self.scaler())
        check_optimizers(self.run.who.optimizers)
        if self._dtype is not None:
            Compressed().check(team)
        for engine in team.engines:
            check_ddp(engine if engine.carrier is None else engine.carrier.ddp)
        left = [one for one in team.bare if one.requires_grad]
        if left:
            raise GradSyncError(
                f"overlap needs the gradients of all parameters of {self.run.name} to travel, but {len(left)} of them, "
                f"of shape {', '.join(str(list(one.shape)) for one in left[:3])}, are in no DistributedDataParallel: "
                "they are DTensors, or left out of it. Use overlap=0."
            )

    # -- a window -----------------------------------------------------------------------------------------------------

    def carry(self, window: Window) -> None:
        """Its gradients are about to synchronise: copies of them depart, and they stay."""
        travels = travels_of(window)
        for travel in travels:
            travel.dtype = self._dtype
            travel.begin()
        self._ddps = [engine.carrier.ddp for engine in window.active if travels and engine.carrier is not None]
        _count(self._ddps, 1)

    def carried(self, window: Window) -> None:
        """They have departed, or have failed to: then `go_back` drops what has."""
        travels = travels_of(window)
        self._flights = [travel.end() for travel in travels]
        for travel in travels:
            travel.dtype = None

    def begin(self) -> None:
        """Called when a call begins: what an exception left travelling lands now.

        The other ranks land it later: if its update fails, this one raises where they do.
        """
        if self._has_gone_back:
            self.settle_quietly()

    @property
    def lands_before_boundary(self) -> bool:
        """Whether an earlier window must land between the last micro-batch of this window and its boundary.

        That is so in a window so short that it ends before the others land. All ranks then run `on_update`, which may
        have collectives or raise, before the collectives of the boundary.
        """
        if not self._legs and self._failure is None:
            return False
        run = self.run  # without an open window, it is the next, which other ranks have
        return self._num_beside < (window_size(run.terms.steps, run.number) if run.window is None else run.window.size)

    def go_on(self, index: int) -> None:
        """The open window has had `index` micro-batches."""
        if index >= self._num_beside:
            self._land()

    def close(self, closing: Closing) -> None:
        """The gradients of the window have departed: land earlier ones, and make a provisional update."""
        window = self.run.open_window
        if window.team.num_ranks == 1:
            super().close(closing)
            return
        if closing.factor is None:
            self._drop()
            self.run.close()
            try:
                self._land()
            finally:
                self.reporter.note(NO_UPDATE, closing)
            return
        self._departing = _Leg(window, closing, self._flights, self._ddps)
        self._flights, self._ddps = (), ()
        self.run.close()
        try:
            self._land()
        except BaseException:
            self._depart(ahead=False)  # it lands at the next call
            raise
        self._depart(ahead=True)

    def settle(self) -> None:
        """Land all that travels."""
        self._land()
        if self._departing is not None:  # from within on_update
            self._depart(ahead=False)
            self._land()

    def settle_quietly(self) -> Exception | None:
        """The same where an error of the update is not to be raised: the next landing raises it. Returns it."""
        try:
            self.settle()
        except Exception as error:
            if self._has_gone_back:  # it has not landed
                raise
            self._failure = error
            link: BaseException | None = error
            while link is not None:  # a traceback would keep the user's objects alive
                link.__traceback__ = None
                link = link.__cause__ or link.__context__
        return self._failure

    def go_back(self) -> None:
        """After an exception: put the last true parameters back, without waiting. What travels lands later."""
        self._drop()
        for leg in self._legs:
            leg.in_flight = go_back(leg.in_flight)
        self._has_gone_back = bool(self._legs)

    def abandon(self) -> str | None:
        """The function or the program ends: keep the last true parameters. Returns what to warn of."""
        failure, self._failure = self._failure, None
        if not self.ids:
            return None if failure is None else f"{self.run.name} ended, and its last update had failed: {failure!r}."
        self.go_back()
        for leg in self._legs:
            leg.in_flight.watch.end()
            _count(leg.ddps, -1)
        self._legs, self._departing = [], None
        return LEFT.format(what=self.run.name)

    def _depart(self, *, ahead: bool) -> None:
        leg, who = self._departing, self.run.who
        if leg is None:
            return
        self._departing = None
        optimizers = [bare_optimizer(one) for one in who.optimizers]
        in_flight = replace(depart(leg.flights, optimizers, who.models, self.settle), spare=self._memory)
        self._memory, leg.in_flight = None, in_flight
        self._legs.append(leg)
        self._has_gone_back = self._has_gone_back or not ahead
        with stepping():
            leg.in_flight = step_ahead(
                in_flight,
                factor=leg.closing.own_factor if ahead else None,
                clip_norm=self.settings.clip_norm,
                nonfinite=self.settings.nonfinite,
            )

    def _land(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback has this frame
        while self._legs:
            leg = self._legs[0]
            in_flight, arrived = leg.in_flight, False
            try:
                with WaitingFor(leg.window.what):
                    failed = leg.closing.has_failed
                    with landing(in_flight), stepping():
                        arrived = True
                        self._legs.remove(leg)
                        self._has_gone_back = bool(self._legs)
                        if not failed:
                            self.run.count(-1)
                            self.step(leg.window, leg.closing, partial(self.run.count, 1))
            finally:
                if arrived:
                    _count(leg.ddps, -1)
                    saved = in_flight.saved or in_flight.spare
                    self._memory = None if saved is None else saved.emptied()
                    for later in self._legs:
                        later.in_flight.watch.note()
                else:
                    self.go_back()
            if failed:
                self.reporter.note(NO_UPDATE, leg.closing)
            self.reporter.call_on_update()

    def _drop(self) -> None:
        _count(self._ddps, -1)
        self._flights, self._ddps = (), ()


def _count(ddps: Sequence[DistributedDataParallel], more: int) -> None:
    for ddp in ddps:
        vars(ddp)[_NUM_TRAVELLING] = vars(ddp).get(_NUM_TRAVELLING, 0) + more
