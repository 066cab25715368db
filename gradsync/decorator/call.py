"""A step function on its models and optimizers: each call a micro-batch, the last of a window its update."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from gradsync._errors import GradSyncError
from gradsync.decorator.compressed import DTYPES, Compressed
from gradsync.decorator.fitted import FittedCall
from gradsync.decorator.last_call import LastCall
from gradsync.decorator.overlapped import Overlapped
from gradsync.decorator.progress import ClosedLosses, Progress
from gradsync.decorator.watches import ForwardWatch, GradientWatch, StepGuard, check_first
from gradsync.functional import (
    Part,
    Run,
    Update,
    Who,
    bare_optimizer,
    check_steppable,
    detach,
    find_loss,
    move,
    refuse_nonfinite,
    step_optimizers,
    zero,
)
from gradsync.ranks.lost import is_lost, lost
from gradsync.ranks.meet import meet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch.amp import GradScaler

    from gradsync.decorator.casting import Cast
    from gradsync.decorator.settings import Settings
    from gradsync.functional import Closing, Loop, LossSum, Place, Team


class Call:
    """The windows of one (function, instance, optimizers). It holds neither models nor optimizers."""

    def __init__(self, name: str, order: int, settings: Settings, cast: Cast, instance: object) -> None:
        self.name = name
        self.order = order  # among those of its function
        self.settings = settings
        self.run = Run(name, settings.terms(), order)
        self.thread: int | None = None  # that of the last call
        self.num_steps = self.num_updates = self.num_skipped = self.num_replays = 0
        self.watch = GradientWatch()
        self.closed: ClosedLosses | None = None
        # What travels while the next window computes; None where everything is exact.
        self.ahead = Overlapped(self, settings.overlap, DTYPES[settings.compress]) if settings.overlap else None
        if self.ahead is not None or settings.compress is not None:
            self.run.crossing = self.ahead or Compressed()
        self._fitted = None if settings.fit is False else FittedCall(settings.fit, self)
        self._instance = _reference(instance)
        self._participants: list[weakref.ref[Any]] = []
        self._schedulers: list[weakref.ref[Any]] = []
        self._scaler: weakref.ref[GradScaler] | None = None
        self.ends: list[weakref.ref[Any]] = []  # which tell that an optimizer is gone
        self._has_met_forward = False
        self._updating = self._running = False
        self._made = self._making = Update(stepped=False, grad_norm=None)
        for one in (*cast.optimizers, *cast.schedulers):
            check_steppable(one)
        for optimizer in cast.optimizers:
            handle = bare_optimizer(optimizer).register_step_pre_hook(StepGuard(self))
            weakref.finalize(self, handle.remove).atexit = False

    # -- participants -----------------------------------------------------------------------------------------------

    def has(self, participants: Sequence[object]) -> bool:
        """Whether these are the participants of the last call: by identity, which is quick."""
        refs = self._participants
        if len(refs) != len(participants):
            return False
        for ref, one in zip(refs, participants):  # noqa: B905, SIM110 - in every call: neither strict= nor all() is free
            if ref() is not one:
                return False
        return True

    def is_for(self, cast: Cast, instance: object) -> bool:
        """Whether these are its optimizers, and its instance."""
        mine = self.run.who.optimizers
        return (
            self._instance() is instance
            and len(mine) == len(cast.optimizers)
            and all(a is b for a, b in zip(mine, cast.optimizers, strict=True))
        )

    def bind(self, cast: Cast, participants: Sequence[object]) -> None:
        """Take note of a call's participants."""
        self.settle()
        models = self.run.who.models
        same = len(models) == len(cast.models) and all(a is b for a, b in zip(models, cast.models, strict=True))
        if not same and self.run.window is not None:
            raise GradSyncError(
                f"{self.name} must be called with the same models throughout a window, but they changed in the "
                "middle of one. Call flush() before another model comes."
            )
        if not same:
            self.run.who = Who(cast.models, cast.optimizers)
        self._participants = [weakref.ref(one) for one in participants]
        self._schedulers = [weakref.ref(scheduler) for scheduler in cast.schedulers]
        self._scaler = None if cast.scaler is None else weakref.ref(cast.scaler)

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler, if there is one."""
        return None if self._scaler is None else self._scaler()

    @property
    def guarded(self) -> bool:
        """Whether an optimizer step of somebody else's would use half a window."""
        return not self._updating and (self.run.index > 0 or self._running)

    @property
    def progress(self) -> Progress:
        """A record of where this stands."""
        window = self.run.window
        return Progress(
            micro_steps=self.num_steps,
            updates=self.num_updates,
            window=self.run.number,
            index=self.run.index,
            size=self._size if window is None else window.size,
            stepped=self._made.stepped,
            skipped=self.num_skipped,
            dropped=self.run.num_dropped,
            replays=self.num_replays,
            parts=1 if self._fitted is None else self._fitted.parts,
            rows=None if self._fitted is None else self._fitted.rows,
            grad_norm=self._made.grad_norm,
            _losses=self.closed,
        )

    _size = 0  # of the last window

    # -- a call -----------------------------------------------------------------------------------------------------

    def micro_batch(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], loop: Loop | None
    ) -> Any:
        """Run the user's function on one micro-batch, its backward, and at the boundary the update."""
        if self._running:
            raise GradSyncError(f"{self.name} must not call itself: a micro-batch is one call. Call the model instead.")
        run = self.run
        self.thread = get_ident()
        self._running, waiting = True, False
        try:
            if self.ahead is not None:
                self.ahead.begin()
            place = run.start(run.who, loop)
            team = run.fit()
            if place.index == 0:
                self.watch.begin(self.name, team)
            with run.holding(place):
                if self._fitted is not None:
                    returned, closing = self._fitted.micro_batch(place, function, args, kwargs)
                else:
                    returned, loss = self._body(function, args, kwargs, team)
                    waiting = True
                    if loss is not None:
                        num_dropped = run.num_dropped
                        closing = run.backward(place, loss, scaler=self.scaler)
                        returned = detach(returned, loss) if run.num_dropped == num_dropped else None
                        if team.forward_communicates:
                            self._remember(function, args, kwargs, loop)
                    else:
                        closing = self._repeat(place) if team.in_step else run.drop(place)
            self.num_steps += 1
            self._end_place(closing)
        except BaseException as error:
            self.discard()
            if waiting and is_lost(error):
                raise lost(error, run.what()) from error
            raise
        finally:
            self._running = False
        self._tell(closing)
        return returned

    def _body(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], team: Team
    ) -> tuple[Any, torch.Tensor | LossSum | None]:
        """What the function returned, and its loss; None and None for a micro-batch that is dropped."""
        if not self.settings.skip:
            returned = function(*args, **kwargs)
            loss = find_loss(returned)
        else:
            began = ForwardWatch(
                self.run.who.models if team.forward_communicates else (),
                lambda: self._meet_at_first_forward(team, runs=True),
            )
            try:
                with began:
                    returned = function(*args, **kwargs)
                    loss = find_loss(returned)
            except self.settings.skip as error:
                if isinstance(error, GradSyncError) or is_lost(error):
                    raise  # misuse is never skipped
                if began:
                    raise GradSyncError(
                        f"{self.name} can drop a micro-batch on a sharded engine only before its model is called, for "
                        f"the other ranks wait in the model's forward, but {type(error).__name__} came after that. "
                        "Check the data before the forward."
                    ) from error
                if team.in_step:
                    self._meet_at_first_forward(team, runs=False)
                return None, None
        self.watch.check(self.name, self.run.index)
        return returned, loss

    def _meet_at_first_forward(self, team: Team, *, runs: bool) -> None:
        """Where forwards communicate and may be dropped: hear, before the first, whether every rank runs it."""
        if not self._has_met_forward:
            self._has_met_forward = True
            said = meet(team.group, f"the first forward of {self.name}", {"runs": runs})
            check_first([one["runs"] for one in said], self.name)

    def _remember(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], loop: Loop | None
    ) -> None:
        """A good micro-batch, to repeat."""
        self.run.last = LastCall(function, args, kwargs)
        if loop is not None:
            loop.kept[self.run] = args, kwargs

    def _repeat(self, place: Place) -> Closing | None:
        """Run the last call once more in place of one that is dropped: the other ranks wait in its forward."""
        self.run.note_dropped()
        return self._run_again(place)

    def _run_again(self, place: Place) -> Closing | None:
        if not self.run.can_repeat:
            raise GradSyncError(
                f"A rank whose engine communicates in forward repeats its last call of {self.name} where it has no "
                "micro-batch to run, but it has had none yet. See to it that its first micro-batch is a good one."
            )
        self.num_replays += 1
        return self.run.repeat(place, find_loss(self.run.last()))

    # -- without a call ---------------------------------------------------------------------------------------------

    def take_part(self, place: Place) -> None:
        """After this rank's data has ended: its part in a window of the other ranks, or the end of its own."""
        run = self.run
        self._running = True
        try:
            with run.holding(place):
                closing = self._run_again(place) if place.part is Part.REPEATS else run.miss(place)
            self._end_place(closing)
        except BaseException:
            self.discard()
            raise
        finally:
            self._running = False
        self._tell(closing)

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

    def reset(self) -> None:
        """Drop the open window; without one, leave the gradients alone: they may be another function's."""
        self.discard()

    def settle(self) -> None:
        """Make the update whose gradients still travel."""
        if self.ahead is not None:
            self.ahead.settle()

    def discard(self) -> None:
        """Drop the open window and its gradients."""
        if self.ahead is not None:
            self.ahead.go_back()
        if self.run.window is not None:
            self._size = self.run.window.size
        self.run.discard()
        self._made = self._made._replace(stepped=False)
        self.watch.forget()

    # -- a boundary -------------------------------------------------------------------------------------------------

    def _end_place(self, closing: Closing | None) -> None:
        if closing is not None:
            self._close(closing)
        else:
            self.watch.remember()
            self._made = self._made._replace(stepped=False)
            if self.ahead is not None:
                self.ahead.go_on(self.run.index)

    def _close(self, closing: Closing) -> None:
        """The gradients are synchronised: make the update, or what `tail` says."""
        run, settings = self.run, self.settings
        window = run.window
        assert window is not None, "it is closed below"
        if not closing.is_window:
            self.settle()
            self.discard()  # the data ended at a boundary
            return
        if self._travels:
            assert self.ahead is not None, "it does"
            self._made = self._made._replace(stepped=False)
            self.ahead.close(closing)
            return
        team = window.team
        closed, self._making = ClosedLosses(window, closing), Update(stepped=False, grad_norm=None)
        is_dropped = closing.factor is None or (settings.tail == "drop" and not closing.filled)
        try:
            if closing.factor is None or is_dropped:
                team.drop_gradients()
            else:
                if window.scale is not None and self.scaler is not None:
                    window.scale.correct(team.parameters, self.scaler)
                self.step(team, closing.factor)
        finally:
            self._clear(team)
            self.end_window()
            self._note(self._making, closed)  # an update, also where a scheduler failed after it
        if not is_dropped:
            refuse_nonfinite(self._making, settings.nonfinite)

    def step(self, team: Team, factor: float) -> Update:
        """Make the update with synchronised gradients, and move the schedulers; the gradients are gone then."""
        try:
            with self.updating():
                self._making = made = step_optimizers(
                    self.run.who.optimizers,
                    scaler=self.scaler,
                    clip_norm=self.settings.clip_norm,
                    factor=factor,
                    nonfinite=self.settings.nonfinite,
                    spread=team.spread,
                )
                if made.stepped:
                    move(one for ref in self._schedulers if (one := ref()) is not None)
        finally:
            self._clear(team)
        return made

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A step inside is ours."""
        found, self._updating = self._updating, True
        try:
            yield
        finally:
            self._updating = found

    def end_window(self) -> None:
        """The window that has synchronised is over, though its update may be still to come."""
        window = self.run.window
        assert window is not None, "it ends here"
        self._size = window.size
        self.run.close()
        self.watch.forget()

    def note_update(self, made: Update, closed: ClosedLosses) -> None:
        """A window's gradients have landed, and its update was made: tell of it."""
        self._note(made, closed)
        refuse_nonfinite(made, self.settings.nonfinite)
        self._tell_update()

    def note_skipped(self, closed: ClosedLosses) -> None:
        """A window has closed without an update, beside one that may have landed."""
        self.num_skipped += 1
        self.closed = closed

    def _note(self, made: Update, closed: ClosedLosses) -> None:
        self.num_updates += made.stepped
        self.num_skipped += not made.stepped
        self._made, self.closed = made, closed

    def _clear(self, team: Team) -> None:
        zero(self.run.who.optimizers)
        for parameter in team.unowned:
            parameter.grad = None

    @property
    def _travels(self) -> bool:
        """Whether updates are made when gradients land, after the window has closed."""
        return self.ahead is not None and self.run.team is not None and self.run.team.num_ranks > 1

    def _tell(self, closing: Closing | None) -> None:
        """Tell of the update of a window that has closed just now."""
        if closing is not None and not self._travels:
            self._tell_update()

    def _tell_update(self) -> None:
        """Call the user's `on_update` after an update."""
        on_update = self.settings.on_update
        if on_update is None or not self._made.stepped:
            return
        instance = self._instance()
        if instance is None:
            on_update(self.progress)
        else:
            on_update(instance, self.progress)

    def begin_anew(self) -> None:
        """Go back to before the first call."""
        self.discard()
        self.num_steps = self.num_updates = self.num_skipped = self.num_replays = 0
        self.run.number = self.run.num_dropped = 0
        self._made, self.closed = Update(stepped=False, grad_norm=None), None


def _reference(instance: object) -> Callable[[], object]:
    """A way to an instance that does not keep it alive, where it can be referenced so."""
    if instance is None:
        return lambda: None
    try:
        return weakref.ref(instance)
    except TypeError:
        return lambda: instance  # it has __slots__
