"""The windows of one (function, instance, optimizers): each call a micro-batch, the last of a window its update."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from gradsync._binding import Binding
from gradsync._errors import GradSyncError
from gradsync._guards import ForwardWatch, GradientWatch, StepGuard
from gradsync._peers import Peers
from gradsync._progress import ClosedLosses, Progress
from gradsync._state import check_scale, check_state, scale_of
from gradsync.functional._loss import detach, find_loss
from gradsync.functional._lost import WaitingFor, is_lost, lost
from gradsync.functional._micro_batch import named_range
from gradsync.functional._notice import Notice
from gradsync.functional._update import check_steppable, update
from gradsync.functional._window import window_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from gradsync._cast import Cast
    from gradsync._feed import Feed
    from gradsync._settings import Settings
    from gradsync.functional._loss import LossSum
    from gradsync.functional._open_window import OpenWindow
    from gradsync.functional._tally import Row

# The windows that are open now, of whatever function: one parameter can be in one of them only.
_OPEN: weakref.WeakSet[Accumulation] = weakref.WeakSet()


class Accumulation:
    """Drives one open window after another, and counts them."""

    def __init__(self, name: str, order: int, settings: Settings, cast: Cast) -> None:
        self.name = name
        self.order = order  # among the windows of its function
        self.index = 0
        self._settings = settings
        self._counts: dict[str, int] = dict.fromkeys(
            ("micro_steps", "updates", "window", "skipped", "dropped", "replays"), 0
        )
        self._binding = Binding(name, settings, cast)
        self._peers = Peers(name, settings, self._counts)
        for optimizer in cast.optimizers:
            optimizer.register_step_pre_hook(StepGuard(self))
        self._watch = GradientWatch()
        self._updating = False
        self._running = False
        self._fed: Feed | None = None  # the last `.over` that it was called in
        self._last_call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
        self._resumed_scale: float | None = None  # that of the gradients which a loaded state brought
        self._stepped = False
        self._grad_norm: torch.Tensor | None = None
        self._losses: ClosedLosses | None = None
        steppable: list[Optimizer | LRScheduler] = [*cast.optimizers, *cast.schedulers]
        for one in steppable:
            check_steppable(one)

    def has(self, participants: Sequence[object]) -> bool:
        """Whether these are the participants of the last call."""
        return self._binding.has(participants)

    def bind(self, cast: Cast, participants: Sequence[object]) -> None:
        """Take note of a call's participants."""
        if self._binding.renew(cast, participants, is_open=self.index > 0):
            self._watch = GradientWatch()

    @property
    def progress(self) -> Progress:
        """A record of where this stands."""
        return Progress(
            **self._counts,
            index=self.index,
            size=self._binding.window.size,
            stepped=self._stepped,
            grad_norm=self._grad_norm,
            _losses=self._losses,
        )

    @property
    def guarded(self) -> bool:
        """Whether an optimizer step of somebody else's would use half a window."""
        return not self._updating and (self.index > 0 or self._running)

    # -- a call -----------------------------------------------------------------------------------------------------

    def micro_batch(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], feed: Feed | None
    ) -> Any:
        """Run the user's function on one micro-batch, its backward, and at the boundary the update."""
        if self._running:
            raise GradSyncError(f"{self.name} must not call itself: a micro-batch is one call. Call the model instead.")
        window = self._binding.window
        ending, more = (False, False) if feed is None else self._take_from(feed)
        self._open_if_new(self._peers.next_source if feed is not None else 0)
        filled = self.index + 1 >= window.size
        last = filled or ending
        waiting = False
        self._running = True
        try:
            with window.hold, named_range("gradsync.sync" if last else "gradsync.hold"):
                returned, loss = self._body(function, args, kwargs)
                waiting = True
                if loss is not None:
                    if last or window.owes_first:
                        self._peers.agree(window, loss)
                    rows, kept = self._backward(loss, feed, last=last, more=more, filled=filled)
                    returned = detach(returned, loss) if kept else None
                elif window.in_step:
                    rows = self._replay(feed, last=last, filled=filled, called=True)
                else:
                    rows = self._reduce(feed, more=more, filled=filled, called=True) if last else None
            self._counts["micro_steps"] += 1
            self.index += 1
            if last:
                self._close(rows, flushing=feed is None)
                self._begin_ahead(feed)
            else:
                self._watch.remember(window.watchable)
                self._stepped = False
        except BaseException as error:
            self.discard()
            if waiting and is_lost(error):
                raise lost(error, self._peers.what()) from error
            raise
        finally:
            self._running = False
        return returned

    def _take_from(self, feed: Feed) -> tuple[bool, bool]:
        """Whether the coming call ends the data, so that it must close the window; and whether more may come."""
        ending, more = feed.called()
        window = self._binding.window
        if self._fed is not feed:
            if window.num_ranks > 1:
                self._meet(feed, has_item=True)
            feed.fed[id(self)] = window.forward_communicates
            self._fed = feed
        if window.num_ranks > 1 and feed.in_step:
            ending, _ = self._peers.in_step(window, real=True, more=more)
        return ending and self._settings.tail != "carry", more

    def _body(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, torch.Tensor | LossSum | None]:
        """What the function returned, and its loss; None and None for a micro-batch that is dropped."""
        window = self._binding.window
        if not self._settings.skip:
            returned = function(*args, **kwargs)
            loss = find_loss(returned)
        else:
            began = ForwardWatch(
                self._binding.models if window.forward_communicates else (),
                lambda: self._peers.first_forward(window, runs=True),
            )
            try:
                with began:
                    returned = function(*args, **kwargs)
                    loss = find_loss(returned)
            except self._settings.skip as error:
                if began:
                    raise GradSyncError(
                        f"{self.name} can drop a micro-batch on a sharded engine only before its model is called, for "
                        f"the other ranks wait in the model's forward, but {type(error).__name__} came after that. "
                        "Check the data before the forward."
                    ) from error
                if window.in_step:
                    self._peers.first_forward(window, runs=False)
                self._counts["dropped"] += 1
                return None, None
        self._watch.check(self.name, window, is_open=self.index > 0)
        if window.forward_communicates:
            self._last_call = (function, args, kwargs)
        return returned, loss

    def _backward(
        self, loss: torch.Tensor | LossSum, feed: Feed | None, *, last: bool, more: bool, filled: bool
    ) -> tuple[Sequence[Row] | None, bool]:
        """The backward; what all ranks brought, where that was asked; and whether the micro-batch was kept.

        One that fails with a type in `skip` makes all ranks drop the window, as they learn at its boundary.
        """
        window, skip = self._binding.window, self._settings.skip
        before = window.num_micro_batches
        try:
            rows = window.backward(
                loss,
                last=last,
                notice=self._peers.notice(window) if last and feed is not None else None,
                more=more,
                filled=filled,
                early=self._early(feed),
                scaler=self._binding.scaler,
            )
        except BaseException as error:
            skipped = isinstance(error, skip) and not window.forward_communicates
            began = window.num_micro_batches > before
            rows = None
            if skipped or (skip and last and began and not is_lost(error)):  # the others wait to hear of it
                rows = window.spoil(last=last, more=more, filled=filled)
            if not skipped:
                raise
            self._counts["dropped"] += 1
            return rows, False
        return rows, True

    def _early(self, feed: Feed | None) -> bool:
        """Whether each micro-batch synchronises.

        Where ranks may run out at different times, one synchronisation a window is what they can count on.
        """
        window = self._binding.window
        return self._settings.sync == "each" and (feed is None or window.num_ranks == 1 or window.forward_communicates)

    def _replay(self, feed: Feed | None, *, last: bool, filled: bool, called: bool) -> Sequence[Row] | None:
        """Run the last call once more, without weight: its forward is what the other ranks wait for."""
        if self._last_call is None:
            raise GradSyncError(
                f"A rank whose engine communicates in forward repeats its last call of {self.name} where it has no "
                "micro-batch to run, but it has had none yet. See to it that its first micro-batch is a good one."
            )
        function, args, kwargs = self._last_call
        self._counts["replays"] += 1
        window = self._binding.window
        loss = find_loss(function(*args, **kwargs))
        notice = None
        if last:
            self._peers.agree(window, None)
            notice = None if feed is None else self._peers.notice(window)
        return window.replay(loss, last=last, notice=notice, filled=filled, called=called, early=self._early(feed))

    def _reduce(self, feed: Feed | None, *, more: bool = False, filled: bool = False, called: bool) -> Sequence[Row]:
        """Synchronise what is held, without a backward."""
        window = self._binding.window
        self._peers.agree(window, None)
        notice = Notice() if feed is None else self._peers.notice(window)
        rows = window.reduce(notice=notice, more=more, filled=filled, called=called)
        assert rows is not None, "a window that is not full is told about"
        return rows

    # -- the end of the data ----------------------------------------------------------------------------------------

    def is_fed_by(self, feed: Feed) -> bool:
        """Whether it was called in that `.over`."""
        return self._fed is feed

    def finish(self, feed: Feed) -> bool:
        """This rank's data has ended: close what is open, take part in one more window of the other ranks.

        Returns whether there may be another. Collective where there are ranks.
        """
        window, peers = self._binding.window, self._peers
        try:
            if window.num_ranks == 1:
                if self.index and self._settings.tail != "carry":
                    self._close(window.reduce(), flushing=False)
                return False
            self._meet(feed, has_item=False)
            with WaitingFor(peers.what):
                finish = self._finish_in_step if window.forward_communicates or feed.in_step else self._finish_window
                goes_on = finish(feed)
            if not goes_on:
                peers.end(window)
        except BaseException:
            self.discard()
            raise
        return goes_on

    def _finish_window(self, feed: Feed) -> bool:
        """Take part in the synchronisation of one more window, if there is one."""
        if not self._peers.any_more:
            return False
        self._open_if_new(self._peers.next_source)
        window, carry = self._binding.window, self._settings.tail == "carry"
        # Where the window is to stay open, each rank keeps what it held.
        held = window.copy_gradients() if carry else {}
        with window.hold:
            rows = self._reduce(feed, called=self.index > 0)
        if carry and not any(row.filled for row in rows):
            window.put_back(held)
        self._close(rows, flushing=False)
        self._begin_ahead(feed)
        return True

    def _finish_in_step(self, feed: Feed) -> bool:
        """Where ranks go in step: take part in each call of another rank, by the last one if forwards communicate."""
        window, carry = self._binding.window, self._settings.tail == "carry"
        rows: Sequence[Row] | None
        nobody_left, anybody = self._peers.in_step(window, real=False, more=False)
        if not anybody:
            if self.index and not carry:
                with window.hold:
                    rows = self._reduce(feed, called=True)
                self._close(rows, flushing=False)
            return False
        self._open_if_new(self._peers.next_source)
        filled = self.index + 1 >= window.size
        last = filled or (nobody_left and not carry)
        with window.hold, named_range("gradsync.sync" if last else "gradsync.hold"):
            if window.forward_communicates:
                rows = self._replay(feed, last=last, filled=filled, called=self.index > 0)
            else:
                rows = self._reduce(feed, called=self.index > 0) if last else None
        self.index += 1
        if last:
            self._close(rows, flushing=False)
        else:
            self._watch.remember(window.watchable)
        return True

    def _meet(self, feed: Feed, *, has_item: bool) -> None:
        self._peers.meet(
            self._binding.window,
            feed,
            self._binding.models,
            order=self.order,
            has_item=has_item,
            is_open=self.index > 0,
            can_replay=has_item or self._last_call is not None,
        )

    def flush(self) -> None:
        """Close the open window now. Collective."""
        window = self._binding.window
        source = self._peers.agree_to_flush(window, self.index)
        if source is None:
            return
        try:
            self._open_if_new(source)
            with WaitingFor(self._peers.what), window.hold:
                rows = self._reduce(None, called=self.index > 0)
            self._close(rows, flushing=True)
        except BaseException:
            self.discard()
            raise

    def reset(self) -> None:
        """Drop the open window; without one, leave the gradients alone: they may be another function's."""
        if self in _OPEN:
            self.discard()

    def discard(self) -> None:
        """Drop the open window and its gradients."""
        self._binding.window.discard()
        self.index = 0
        self._stepped = False
        self._resumed_scale = None
        self._watch.forget()
        _OPEN.discard(self)

    # -- a window ---------------------------------------------------------------------------------------------------

    def _open_if_new(self, source: int) -> None:
        """Begin a window if none is open, with the buffers of rank `source`."""
        if self.index == 0:
            self._open()
        window = self._binding.window
        self._peers.begin(window, window.size, source)

    def _begin_ahead(self, feed: Feed | None) -> None:
        """Where a loop feeds several windows, begin the next one with the other ranks as one closes.

        A rank that has run out takes part in whole windows in turn, and so each must communicate in one piece.
        """
        if feed is None or feed.in_step or len(feed.fed) == 1:
            return
        if self.index == 0 and self._peers.any_more:
            size = window_size(self._settings.steps, self._counts["window"])
            self._peers.begin(self._binding.window, size, self._peers.next_source)

    def _open(self) -> None:
        window = self._binding.window
        for other in list(_OPEN):
            if other is not self and not self._binding.ids.isdisjoint(other._binding.ids):
                raise GradSyncError(
                    f"A parameter can be in one open window at a time, but {self.name} begins one with parameters that "
                    f"are in the open window of {other.name}. Call {other.name}.flush() or .reset() first, or keep the "
                    "other model out of one of the optimizers."
                )
        window.open(window_size(self._settings.steps, self._counts["window"]))
        if self._watch.is_new:
            left, inside = window.gradients_left()
            if left or inside:
                drop = "gradsync.sync_gradients(model) and " if inside else ""
                raise GradSyncError(
                    f"A window must begin without gradients, but {left or inside} parameters have one as {self.name} "
                    f"begins its first. Call {drop}optimizer.zero_grad() after your own backwards."
                )
        _OPEN.add(self)

    def _close(self, rows: Sequence[Row] | None, *, flushing: bool) -> None:
        """The gradients are synchronised: make the update, or what `tail` says."""
        window, tail = self._binding.window, self._settings.tail
        if rows is not None:
            self._peers.note(rows)
            if not any(row.called for row in rows):
                self.discard()  # the data ended at a boundary: this is no window
                self._peers.begun = False
                return
        if self._resumed_scale is not None:
            check_scale(self._resumed_scale, self._binding.scaler, self.name)
            self._resumed_scale = None
        filled = self.index >= window.size or (rows is not None and any(row.filled for row in rows))
        if not filled and tail == "carry" and not flushing:
            self._watch.remember(window.watchable)
            return
        factor = window.factor(rows)
        losses = ClosedLosses(window.losses, window.divisor)
        stepped, grad_norm = False, None
        try:
            if factor is None or (tail == "drop" and not filled):
                window.discard()
            else:
                stepped, grad_norm = self._update(window, factor)
        finally:
            for parameter in self._binding.unowned:
                parameter.grad = None
            _OPEN.discard(self)
            self._peers.begun = False
            self.index = 0
            self._counts["window"] += 1
            self._counts["updates" if stepped else "skipped"] += 1
            self._watch.forget()
            self._stepped, self._grad_norm, self._losses = stepped, grad_norm, losses

    def _update(self, window: OpenWindow, factor: float) -> tuple[bool, torch.Tensor | None]:
        self._updating = True
        try:
            return update(
                self._binding.optimizers,
                schedulers=self._binding.schedulers,
                scaler=self._binding.scaler,
                clip_norm=self._settings.clip_norm,
                factor=factor,
                nonfinite=self._settings.nonfinite,
                spread=window.spread,
            )
        finally:
            self._updating = False

    # -- its state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counters, and what the open window holds, as plain values and tensors."""
        window, names, steps = self._binding.window, self._binding.names(), self._settings.steps
        state: dict[str, Any] = {
            **self._counts,
            "index": self.index,
            "size": window.size,
            "shared": self._peers.begun,
            "steps": steps if isinstance(steps, int) else None,
            "num_ranks": window.num_ranks,
            "parameters": {name: list(parameter.shape) for name, parameter in names.items()},
        }
        if self.index:
            state["open"] = {
                **window.state_dict(names), "spoiled": window.void, "scale": scale_of(self._binding.scaler)
            }  # fmt: skip
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if a state belongs to other steps, models or ranks."""
        check_state(state, self.name, self._settings.steps, self._binding.window.num_ranks, self._binding.names())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `check_state` has found to fit. It does not communicate."""
        self.begin_anew()
        window = self._binding.window
        self._counts.update({key: state[key] for key in self._counts})
        self._peers.begun = state["shared"]
        if state["index"]:
            self._open()
            window.load_state_dict(state["open"], self._binding.names())
            window.void, self._resumed_scale = state["open"]["spoiled"], state["open"]["scale"]
            self.index = state["index"]
            self._watch.remember(window.watchable)

    def begin_anew(self) -> None:
        """Go back to before the first call."""
        self.reset()
        self._counts.update(dict.fromkeys(self._counts, 0))
        self._peers.begun, self._losses, self._grad_norm = False, None, None
