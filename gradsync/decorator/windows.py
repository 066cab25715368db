"""`Windows`: the windows of a step function and its optimizers, one after another. A call is a micro-batch."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from torch import nn

from gradsync._errors import GradSyncError
from gradsync._step_hook import watch_steps
from gradsync.decorator.body import Body, Replay
from gradsync.decorator.body_watch import BodyWatch
from gradsync.decorator.compressed import Compressed
from gradsync.decorator.overlapped import Overlapped
from gradsync.decorator.participants import reference
from gradsync.decorator.record import Record
from gradsync.decorator.updater import Updater
from gradsync.functional import InParts, Part, Run, Who, check_steppable, detach, is_scaling, owned
from gradsync.overlap import check_compress
from gradsync.ranks.lost import WaitingFor

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from gradsync.decorator.participants import Participants
    from gradsync.decorator.settings import Settings
    from gradsync.functional import Closing, Loop, Place


class Windows:
    """The windows of one (function, instance, optimizers). It holds neither models nor optimizers."""

    def __init__(self, name: str, order: int, settings: Settings, participants: Participants, instance: object) -> None:
        self.name = name
        self.order = order  # its number among the function's calls
        self.settings = settings
        self.run = Run(name, settings.terms(), order)
        self.thread: int | None = None  # of the last call
        self.watch = BodyWatch(name)
        self._instance = reference(instance)
        self.record = Record(self.run, settings.on_update, self._instance)
        self._updater = Updater(self.run, settings, self.record, self.watch)
        self._body = Body(self.run, settings.skip)
        # With `overlap`: windows whose gradients travel while the next window computes.
        self.ahead = Overlapped(self._updater, check_compress(settings.compress)) if settings.overlap else None
        if self.ahead is not None or settings.compress is not None:
            self.run.transport = self.ahead or Compressed()
        self._in_parts = None if settings.fit is False else InParts(settings.fit, name)
        self._participants: list[Callable[[], object]] = []
        self._counted: list[Callable[[], object]] = []  # those of them that are not the same if they are others
        self.ends: list[weakref.ref[Any]] = []  # their callbacks tell that an optimizer is gone
        self.is_running = False
        for one in (*participants.optimizers, *participants.schedulers):
            check_steppable(one)
        watch_steps(self)

    # -- participants -----------------------------------------------------------------------------------------------

    def has(self, found: Sequence[object]) -> bool:
        """Whether these are the participants of the last call, by identity (quick)."""
        refs = self._participants
        if len(refs) != len(found):
            return False
        for ref, one in zip(refs, found):  # noqa: B905, SIM110 - in every call; strict= and all() cost time
            if ref() is not one:
                return False
        return True

    def is_for(self, participants: Participants, instance: object) -> bool:
        """Whether these are the windows of these optimizers and this instance."""
        mine = self.run.who.optimizers
        return (
            self._instance() is instance
            and len(mine) == len(participants.optimizers)
            and all(a is b for a, b in zip(mine, participants.optimizers, strict=True))
        )

    def bind(self, participants: Participants, found: Sequence[object]) -> None:
        """Take note of a call's participants."""
        self.settle()
        before, models = self.run.who.models, participants.models
        same = len(before) == len(models) and all(a is b for a, b in zip(before, models, strict=True))
        if not same and self.run.window is not None:
            raise GradSyncError(
                f"{self.name} must be called with the same models throughout a window, but they changed in the "
                "middle of one. Call flush() before another model comes."
            )
        if not same:
            self.run.who = Who(models, participants.optimizers)
        now = is_scaling(participants.scaler)
        if self.run.index and now != is_scaling(self._updater.scaler):
            raise GradSyncError(
                f"All losses of a window of {self.name} must be scaled, or none of them, but a GradScaler "
                f"{'came' if now else 'went'} in the middle of one. Pass it to each call, and "
                "call flush() or reset() before that changes."
            )
        self._participants = [reference(one) for one in found]
        self._updater.bind(participants)
        # A loss module without parameters may be another in each call.
        counted = [one for one in found if not isinstance(one, nn.Module) or next(one.parameters(), None) is not None]
        if [id(ref()) for ref in self._counted] != [*map(id, counted)]:
            self.run.num_changes += 1
            self._counted = [reference(one) for one in counted]

    def __call__(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step. It may be made anew, or step in the backward, and not be one of the call's."""
        if self.run.index == 0 and not self.is_running:
            return
        if not set(map(id, owned(self.run.who.optimizers))).isdisjoint(map(id, owned([optimizer]))):
            raise GradSyncError(
                f"{self.name} steps its optimizer itself at each boundary, but something called "
                f"optimizer.step(), of type {type(optimizer).__name__}, in the middle of a window, on gradients that "
                "are not synchronised. Remove that call; an optimizer that steps in the backward cannot accumulate."
            )

    # -- a call -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        """Inside, a call of these windows runs. An error discards the open window."""
        self.is_running = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self.discard()
        finally:
            self.is_running = False

    def micro_batch(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], loop: Loop | None
    ) -> Any:
        """Run the user's function on one micro-batch, its backward, and at the boundary the update."""
        if self.is_running or self.record.is_telling:
            raise GradSyncError(
                f"{self.name} must not be called from its own body or on_update: a micro-batch is one call, and ranks "
                "that have run out make updates without one. Call the model instead."
            )
        run, ahead = self.run, self.ahead
        self.thread = get_ident()
        with self:
            if ahead is not None:
                ahead.begin()
            place = run.start(run.who, loop)
            if ahead is not None and ahead.lands_before(place):
                returned, _ = self._run(place._replace(last=False), function, args, kwargs, loop)
                ahead.settle()
                with run.holding(place):
                    closing = run.miss(place)  # synchronises what was held
            else:
                returned, closing = self._run(place, function, args, kwargs, loop)
            self.record.num_steps += 1
            with WaitingFor(run.what):
                self._end_place(closing)
        self._tell(closing)
        return returned

    def _run(
        self,
        place: Place,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loop: Loop | None,
    ) -> tuple[Any, Closing | None]:
        """Run the function and its backward; returns what it returned, and in the last place the closing."""
        run = self.run
        window = run.window
        assert window is not None, "opened by now"
        team = window.team
        if place.index == 0:
            self.watch.begin(team)
        with run.holding(place):
            if self._in_parts is not None:
                scaler, changes = self._updater.scaler, self.watch.check
                ran = self._in_parts.run(run, place, function, args, kwargs, scaler=scaler, changes=changes)
                self.record.parts, self.record.rows = self._in_parts.parts, self._in_parts.rows
                return ran
            replay = Replay(function, args, kwargs) if team.forward_communicates else None
            returned, loss = self._body(function, args, kwargs, team)
            with WaitingFor(run.what):
                if loss is not None:
                    self.watch.check()
                    num_dropped = window.num_dropped
                    closing = run.backward(place, loss, scaler=self._updater.scaler)
                    returned = detach(returned, loss) if window.num_dropped == num_dropped else None
                    if replay is not None:
                        self._body.remember(replay, args, kwargs, loop)
                elif team.lockstep:
                    window.drop()
                    closing = self._run_again(place._replace(part=Part.REPEATS))
                else:
                    closing = run.drop(place)
        return returned, closing

    def _run_again(self, place: Place) -> Closing | None:
        with self.run.holding(place):
            closing = self.run.backward(place, self._body.again())
        self.record.num_replays += 1
        return closing

    # -- without a call ---------------------------------------------------------------------------------------------

    def take_part(self, place: Place) -> None:
        """After this rank's data has ended: close its own open window, or take part in a window of the other ranks."""
        run = self.run
        with self:
            if place.part is Part.REPEATS:
                closing = self._run_again(place)
            else:
                with run.holding(place):
                    closing = run.miss(place)
            self._end_place(closing)
        self._tell(closing)

    def insist_on_rest(self, what: str) -> None:
        """Raise in the middle of a micro-batch of this thread, whose window `what` would close or replace."""
        if self.is_running and self.thread in {None, get_ident()}:
            raise GradSyncError(
                f"{what} of {self.name} came in the middle of a call: in its body, or in an on_update that overlap "
                "calls while the next window is open, at another place on ranks that have run out. Call it between two "
                "calls, or after the loop."
            )

    def land_before_boundary(self) -> None:
        """This rank's data has ended: before the next boundary of the others, land what they land before it."""
        if self.ahead is None:
            return
        with self:  # like the other ranks
            self.ahead.land_before_boundary()

    def flush(self) -> None:
        """Close the open window now. Collective."""
        self.settle()
        if not self.run.agree_to_flush():
            return
        try:
            closing = self.run.flush()
            assert closing is not None, "the last place of a window closes it"
            self._close(closing)
            self.settle()
        except BaseException:
            self.discard()
            raise
        self._tell(closing)

    def settle(self) -> None:
        """Wait for gradients that still travel, and make their update."""
        if self.ahead is not None:
            self.ahead.settle()

    def go_back(self) -> None:
        """After an exception, which waits for nothing: put the last true parameters back."""
        if self.ahead is not None:
            self.ahead.go_back()

    def discard(self) -> None:
        """Discard the open window and its gradients. Without one gradients stay: they may be another function's."""
        self.go_back()
        if self.run.window is not None:
            self.record.size = self.run.window.size
        self.run.discard()
        self.record.note_held()
        self.watch.forget()

    def begin_anew(self) -> None:
        """Go back to before the first call."""
        self.discard()
        self.record.begin_anew()
        self.run.go_on_from(0, 0)

    # -- a boundary -------------------------------------------------------------------------------------------------

    def _end_place(self, closing: Closing | None) -> None:
        if closing is not None:
            self._close(closing)
        else:
            self.watch.remember()
            self.record.note_held()
            if self.ahead is not None:
                self.ahead.go_on(self.run.index)

    def _close(self, closing: Closing) -> None:
        """After the boundary: make the update, or with `overlap` leave it until the gradients have arrived."""
        if not closing.is_window:
            self.settle()
            self.discard()  # the data ended at a boundary
        elif self.ahead is not None and self._travels:
            self.record.note_held()
            self.ahead.close(closing)
        else:
            self._updater.close(closing)

    @property
    def _travels(self) -> bool:
        """Whether an update is made when gradients arrive, after its window has closed."""
        return self.ahead is not None and self.run.team is not None and self.run.team.num_ranks > 1

    def _tell(self, closing: Closing | None) -> None:
        """Call `on_update` for a window that has just closed."""
        if closing is not None and not self._travels:
            self.record.tell()
