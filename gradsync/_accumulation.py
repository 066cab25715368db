"""The windows of one (function, instance, optimizers): each call a micro-batch, the last of a window its update."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from gradsync._errors import GradSyncError
from gradsync._guards import ForwardWatch, GradientWatch, StepGuard, check_replays, check_sync_batchnorm
from gradsync._progress import ClosedLosses, Progress
from gradsync._state import OR_WITHOUT_IT, check_steps_of, unwrapped
from gradsync.engines import attach, find, rest
from gradsync.functional._agreement import agree_on_model, insist, meet
from gradsync.functional._bystanders import Bystanders
from gradsync.functional._loss import LossSum, detach, find_loss
from gradsync.functional._lost import WaitingFor, is_lost, lost
from gradsync.functional._micro_batch import named_range
from gradsync.functional._open_window import OpenWindow
from gradsync.functional._tally import Row
from gradsync.functional._update import check_steppable, owned, update
from gradsync.functional._window import window_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from gradsync._cast import Cast
    from gradsync._feed import Feed
    from gradsync._settings import Settings

# The windows that are open now, of whatever function: one parameter can be in one of them only.
_OPEN: weakref.WeakSet[Accumulation] = weakref.WeakSet()


class Accumulation:
    """Drives one open window after another, and counts them.

    It refers to the user's optimizers, schedulers, scaler and models weakly: who drops those drops this.
    """

    def __init__(self, name: str, order: int, settings: Settings, cast: Cast) -> None:
        self.name = name
        self.order = order  # among the windows of its function
        self._settings = settings
        self._models: tuple[weakref.ref[nn.Module], ...] = ()
        self._optimizers = [weakref.ref(optimizer) for optimizer in cast.optimizers]
        self._guards = [optimizer.register_step_pre_hook(StepGuard(self)) for optimizer in cast.optimizers]
        self._updating = False
        self._running = False
        self._agreed = False
        self._may_have_more: list[bool] = []  # by rank, in the `.over` that runs
        self._met: Feed | None = None  # the `.over` whose ranks have met,
        self._fed: Feed | None = None  # that it was called in
        self._last_source = 0  # the lowest rank with a micro-batch in the last window
        self._uneven = False
        self._shared = False  # whether the buffers of all ranks were made equal for the coming window
        self._watch = GradientWatch()
        self._last_call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
        self._scaler: weakref.ref[GradScaler] | None = None
        self._resumed_scale: float | None = None  # that of the gradients which a loaded state brought
        self._stepped = False
        self._grad_norm: torch.Tensor | None = None
        self._losses: ClosedLosses | None = None
        self.index = 0
        self._counts = dict.fromkeys(("micro_steps", "updates", "window", "skipped", "dropped", "replays"), 0)
        self._participants: list[weakref.ref[Any]] = []
        self._bind_models(cast)
        steppable: list[Optimizer | LRScheduler] = [*cast.optimizers, *cast.schedulers]
        for one in steppable:
            check_steppable(one)

    # -- participants -----------------------------------------------------------------------------------------------

    def has(self, participants: Sequence[object]) -> bool:
        """Whether these are the participants of the last call: by identity, at 0.1 us each."""
        refs = self._participants
        if len(refs) != len(participants):
            return False
        for ref, one in zip(refs, participants):  # noqa: B905, SIM110 - in every call: neither strict= nor all() is free
            if ref() is not one:
                return False
        return True

    def bind(self, cast: Cast, participants: Sequence[object]) -> None:
        """Take note of a call's participants."""
        self._bind_models(cast)
        self._participants = [weakref.ref(one) for one in participants]
        self._schedulers = [weakref.ref(scheduler) for scheduler in cast.schedulers]
        self._scaler = None if cast.scaler is None else weakref.ref(cast.scaler)

    def _bind_models(self, cast: Cast) -> None:
        if len(cast.models) == len(self._models) and all(
            ref() is model for ref, model in zip(self._models, cast.models, strict=True)
        ):
            return
        if self.index:
            raise GradSyncError(
                f"{self.name} must be called with the same models throughout a window, but they changed in the middle "
                "of one. Call flush() before another model comes."
            )
        rest(cast.models)
        mine = {id(parameter) for parameter in owned(cast.optimizers)}
        trained = [model for model in cast.models if any(id(p) in mine for p in model.parameters())]
        if not trained:
            raise GradSyncError(
                f"At least one model must have parameters in the optimizer, but none that {self.name} was called with "
                "has. Make the optimizer from the parameters of the model that it is called with."
            )
        inside = {id(module) for model in trained for module in model.modules() if module is not model}
        trained = [model for model in trained if id(model) not in inside]
        parameters = dict.fromkeys(p for model in trained for p in model.parameters())
        parameters.update(dict.fromkeys(owned(cast.optimizers)))
        watching = [model for model in cast.models if not any(p in parameters for p in model.parameters())]
        self._ids = frozenset(map(id, parameters))
        self._unowned = [parameter for parameter in parameters if id(parameter) not in mine]
        bystanders = Bystanders([p for model in watching for p in model.parameters()], find(watching))
        with WaitingFor(lambda: f"the first call of {self.name}, which makes the models equal"):
            engines = attach(trained, agree_on_model)
        self._window = OpenWindow(
            engines,
            list(parameters),
            bystanders,
            shards=self._settings.sync == "shard",
            tell_after=bool(self._settings.skip),
        )
        self._models = tuple(weakref.ref(model) for model in cast.models)
        self._watch = GradientWatch()

    # -- a call -----------------------------------------------------------------------------------------------------

    def micro_batch(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], feed: Feed | None
    ) -> Any:
        """Run the user's function on one micro-batch, its backward, and at the boundary the update."""
        if self._running:
            raise GradSyncError(f"{self.name} must not call itself: a micro-batch is one call. Call the model instead.")
        window, settings = self._window, self._settings
        ending = more = False
        if feed is not None:
            ending, more = self._take_from(feed)
        if self.index == 0:
            self._open()
        if not self._shared:
            self._share_buffers(self._next_source() if feed is not None else 0)
        filled = self.index + 1 >= window.size
        last = filled or ending
        # Where ranks may run out at different times, one synchronisation a window is what they can count on.
        early = settings.sync == "each" and (feed is None or window.num_ranks == 1 or window.forward_communicates)
        rows: Sequence[Row] | None = None
        synchronising = False
        self._running = True
        try:
            with window.hold, named_range("gradsync.sync" if last else "gradsync.hold"):
                returned, loss = self._body(function, args, kwargs)
                synchronising = True
                weightless = loss is None and window.forward_communicates
                if weightless:
                    loss = self._last_loss()
                if last or window.owes_first:
                    self._agree(None if weightless else loss)
                if weightless and loss is not None:
                    rows = window.replay(loss, last=last, filled=filled, called=True, early=early)
                elif loss is not None:
                    before = window.num_micro_batches
                    try:
                        rows = window.backward(
                            loss,
                            last=last,
                            ask=feed is not None,
                            more=more,
                            filled=filled,
                            early=early,
                            scaler=None if self._scaler is None else self._scaler(),
                        )
                    except settings.skip:
                        returned, loss, rows = None, None, self._spoil(last=last, more=more, filled=filled)
                    except BaseException as error:
                        if last and settings.skip and window.num_micro_batches > before and not is_lost(error):
                            window.spoil(last=True, more=more, filled=filled)  # the others wait to hear of it
                        raise
                elif last:
                    rows = window.reduce(more=more, filled=filled)
            self._counts["micro_steps"] += 1
            self.index += 1
            if last:
                self._close(rows, flushing=feed is None)
            else:
                self._watch.remember(window.watchable)
                self._stepped = False
        except BaseException as error:
            self.discard()
            if synchronising and is_lost(error):
                raise lost(error, self._gradients()) from error
            raise
        finally:
            self._running = False
        return returned if loss is None or weightless else detach(returned, loss)

    def _body(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, torch.Tensor | LossSum | None]:
        """What the function returned, and its loss; None and None for a micro-batch that is dropped."""
        if not self._settings.skip:
            returned = function(*args, **kwargs)
            loss = find_loss(returned)
        else:
            began = ForwardWatch(self._models if self._window.forward_communicates else ())
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
                self._counts["dropped"] += 1
                return None, None
        self._watch.check(self.name, self._window, is_open=self.index > 0)
        if self._window.forward_communicates:
            self._last_call = (function, args, kwargs)
        return returned, loss

    def _spoil(self, *, last: bool, more: bool, filled: bool) -> list[Row] | None:
        """A backward failed with a type in `skip`: all ranks drop the window, as they learn at its boundary."""
        if self._window.forward_communicates:
            raise  # noqa: PLE0704 - called in the handler: a sharded backward that failed cannot be made up for
        self._counts["dropped"] += 1
        return self._window.spoil(last=last, more=more, filled=filled)

    def _last_loss(self) -> torch.Tensor | LossSum:
        """Run the last call once more: its forward is what the other ranks wait for."""
        if self._last_call is None:
            raise GradSyncError(
                f"A rank whose engine communicates in forward repeats its last call of {self.name} where it has no "
                "micro-batch to run, but it has had none yet. See to it that its first micro-batch is a good one."
            )
        function, args, kwargs = self._last_call
        self._counts["replays"] += 1
        return find_loss(function(*args, **kwargs))

    # -- the end of the data ----------------------------------------------------------------------------------------

    def is_fed_by(self, feed: Feed) -> bool:
        """Whether it was called in that `.over`."""
        return self._fed is feed

    def finish(self, feed: Feed) -> bool:
        """This rank's data has ended: close what is open, take part in one more window of the other ranks.

        Returns whether there may be another. Collective where there are ranks.
        """
        window, settings = self._window, self._settings
        try:
            if window.num_ranks == 1:
                if self.index and settings.tail != "carry":
                    self._close(window.reduce(), flushing=False)
                return self._end()
            if self._met is not feed:
                self._meet(feed, has_item=False)
            with WaitingFor(self._gradients):
                if window.forward_communicates:
                    return self._finish_in_step()
                if not any(self._may_have_more):
                    return self._end()
                if self.index == 0:
                    self._open()
                if not self._shared:
                    self._share_buffers(self._next_source())
                self._close(self._reduce_tail(), flushing=False)
                return True
        except BaseException:
            self.discard()
            raise

    def _finish_in_step(self) -> bool:
        """Where forwards communicate: repeat the last call, as often as another rank runs one."""
        window, carry = self._window, self._settings.tail == "carry"
        nobody_left, anybody = self._in_step(real=False, more=False)
        if not anybody:
            if self.index and not carry:
                self._close(self._reduce(), flushing=False)
            return self._end()
        if self.index == 0:
            self._open()
        if not self._shared:
            self._share_buffers(self._next_source())
        filled = self.index + 1 >= window.size
        last = filled or (nobody_left and not carry)
        with window.hold, named_range("gradsync.sync" if last else "gradsync.hold"):
            loss = self._last_loss()
            if last:
                self._agree(None)
            rows = window.replay(
                loss, last=last, filled=filled, called=self.index > 0, early=self._settings.sync == "each"
            )
        self.index += 1
        if last:
            self._close(rows, flushing=False)
        return True

    def _reduce(self) -> list[Row]:
        """Synchronise what is held, without a backward."""
        window = self._window
        with window.hold:
            self._agree(None)
            return window.reduce(called=self.index > 0)

    def _reduce_tail(self) -> list[Row]:
        """The same at the end of the data, where `tail="carry"` may keep the window open: then each rank keeps its own."""
        carry = self._settings.tail == "carry"
        held = self._window.copy_gradients() if carry else {}
        rows = self._reduce()
        if carry and not any(row.filled for row in rows):
            self._window.put_back(held)
        return rows

    def flush(self) -> None:
        """Close the open window now. Collective."""
        window = self._window
        words = {"number of closed windows at flush": self._counts["window"]}
        said = meet(window.group, f"flush of {self.name}", {**words, "open": self.index})
        insist([{key: one[key] for key in words} for one in said])
        if not any(one["open"] for one in said):
            return
        if self.index == 0:
            self._open()
        if not self._shared:
            self._share_buffers(next(rank for rank, one in enumerate(said) if one["open"]))
        try:
            with WaitingFor(self._gradients):
                self._close(self._reduce(), flushing=True)
        except BaseException:
            self.discard()
            raise

    def reset(self) -> None:
        """Drop the open window; without one, leave the gradients alone: they may be another function's."""
        if self in _OPEN:
            self.discard()

    def discard(self) -> None:
        """Drop the open window and its gradients."""
        self._window.discard()
        self.index = 0
        self._stepped = False
        self._resumed_scale = None
        self._watch.forget()
        _OPEN.discard(self)

    def begin_anew(self) -> None:
        """Go back to before the first call."""
        self.reset()
        self._counts = dict.fromkeys(self._counts, 0)
        self._shared, self._losses, self._grad_norm = False, None, None

    @property
    def guarded(self) -> bool:
        """Whether an optimizer step of somebody else's would use half a window."""
        return not self._updating and (self.index > 0 or self._running)

    # -- its state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counters, and what the open window holds, as plain values and tensors."""
        names = self._names()
        steps = self._settings.steps
        state: dict[str, Any] = {
            **self._counts,
            "index": self.index,
            "size": self._window.size,
            "shared": self._shared,
            "steps": steps if isinstance(steps, int) else None,
            "num_ranks": self._window.num_ranks,
            "parameters": {name: list(parameter.shape) for name, parameter in names.items()},
        }
        if self.index:
            state["open"] = {**self._window.state_dict(names), "spoiled": self._window.void, "scale": self._scale()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `check_state` has found to fit. It does not communicate."""
        self.begin_anew()
        self._counts = {key: state[key] for key in self._counts}
        self._shared = state["shared"]
        if state["index"]:
            self._open()
            self._window.load_state_dict(state["open"], self._names())
            self._window.void, self._resumed_scale = state["open"]["spoiled"], state["open"]["scale"]
            self.index = state["index"]
            self._watch.remember(self._window.watchable)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if a state belongs to other models or ranks."""
        names = self._names()
        here = {name: list(parameter.shape) for name, parameter in names.items()}
        check_steps_of(state, self.name, self._settings.steps)
        if state["num_ranks"] != self._window.num_ranks:
            raise GradSyncError(
                f"A state of {self.name} can be loaded on as many ranks as it was saved on, {state['num_ranks']}, but "
                f"there are {self._window.num_ranks}. Start that many{OR_WITHOUT_IT}"
            )
        if state["parameters"] != here:
            odd = sorted(name for name, _ in state["parameters"].items() ^ here.items())
            raise GradSyncError(
                f"A state of {self.name} can be loaded for the parameters that it was saved for, names and shapes, but "
                f"these differ in {', '.join(odd[:5])}{' and others' if len(odd) > 5 else ''}. Call it with the same "
                f"models and optimizers{OR_WITHOUT_IT}"
            )

    def _scale(self) -> float:
        """What the held gradients are multiplied by."""
        scaler = None if self._scaler is None else self._scaler()
        return 1.0 if scaler is None else scaler.get_scale()

    def _check_scale(self) -> None:
        """Raise if gradients that were held in another process were scaled by another number than those from here."""
        held, self._resumed_scale = self._resumed_scale, None
        if held is not None and held != self._scale():
            raise GradSyncError(
                f"A window that is resumed in its middle needs the scaler that it began with, but the gradients in the "
                f"state of {self.name} are scaled by {held:g}, and those since then by {self._scale():g}. Save "
                "scaler.state_dict() in the same checkpoint, and load both."
            )

    def _names(self) -> dict[str, nn.Parameter]:
        """The parameters by their names: the same however the model is wrapped."""
        models = [model for ref in self._models if (model := ref()) is not None]
        mine = {id(parameter): parameter for parameter in self._window.parameters}
        several = len(models) > 1
        names: dict[str, nn.Parameter] = {}
        for place, model in enumerate(models):
            for name, parameter in unwrapped(model).named_parameters():
                if id(parameter) in mine:
                    names[f"{place}.{name}" if several else name] = parameter
        for parameter in names.values():
            mine.pop(id(parameter), None)
        # What the optimizers have besides, in their order.
        return names | {f"optimizer parameter {place}": parameter for place, parameter in enumerate(mine.values())}

    # -- a window ---------------------------------------------------------------------------------------------------

    def _next_source(self) -> int:
        """The lowest rank that may have a micro-batch in the coming window."""
        return next((rank for rank, more in enumerate(self._may_have_more) if more), 0)

    def _open(self) -> None:
        for other in list(_OPEN):
            if other is not self and not self._ids.isdisjoint(other._ids):
                raise GradSyncError(
                    f"A parameter can be in one open window at a time, but {self.name} begins one with parameters that "
                    f"are in the open window of {other.name}. Call {other.name}.flush() or .reset() first, or keep the "
                    "other model out of one of the optimizers."
                )
        self._window.open(window_size(self._settings.steps, self._counts["window"]))
        if self._watch.is_new:
            left, inside = self._window.gradients_left()
            if left or inside:
                drop = "gradsync.sync_gradients(model) and " if inside else ""
                raise GradSyncError(
                    f"A window must begin without gradients, but {left or inside} parameters have one as {self.name} "
                    f"begins its first. Call {drop}optimizer.zero_grad() after your own backwards."
                )
        _OPEN.add(self)

    def _share_buffers(self, source: int) -> None:
        """Once a window, however often this rank discards and begins it again: it is collective."""
        with WaitingFor(lambda: f"making the buffers equal for window {self._counts['window']} of {self.name}"):
            self._window.share_buffers(source)
        self._shared = True

    def _close(self, rows: Sequence[Row] | None, *, flushing: bool) -> None:
        """The gradients are synchronised: normalise them and make the update, or what `tail` says."""
        window, settings = self._window, self._settings
        if rows is not None:
            self._uneven |= len({(row.num_micro_batches, row.filled, row.more) for row in rows}) > 1
            self._may_have_more = [row.more for row in rows]
            self._last_source = next((rank for rank, row in enumerate(rows) if row.num_micro_batches), 0)
            if not any(row.called for row in rows):
                self.discard()  # the data ended at a boundary: this is no window
                return
        if self._resumed_scale is not None:
            self._check_scale()
        filled = self.index >= window.size or (rows is not None and any(row.filled for row in rows))
        if not filled and settings.tail == "carry" and not flushing:
            self._watch.remember(window.watchable)
            return
        factor = window.factor(rows)
        if not filled and settings.tail == "drop":
            factor = None
        stepped, grad_norm = False, None
        losses = ClosedLosses(window.losses, window.divisor)
        try:
            if factor is None:
                window.discard()
            else:
                scaler = None if self._scaler is None else self._scaler()
                self._updating = True
                stepped, grad_norm = update(
                    [optimizer for ref in self._optimizers if (optimizer := ref()) is not None],
                    schedulers=[scheduler for ref in self._schedulers if (scheduler := ref()) is not None],
                    scaler=scaler,
                    clip_norm=settings.clip_norm,
                    factor=factor,
                    nonfinite=settings.nonfinite,
                    spread=window.spread,
                )
        finally:
            self._updating = False
            for parameter in self._unowned:
                parameter.grad = None
            _OPEN.discard(self)
            self.index = 0
            self._shared = False
            self._counts["window"] += 1
            self._counts["updates" if stepped else "skipped"] += 1
            self._watch.forget()
            self._stepped, self._grad_norm, self._losses = stepped, grad_norm, losses

    # -- ranks ------------------------------------------------------------------------------------------------------

    def _take_from(self, feed: Feed) -> tuple[bool, bool]:
        """Whether the coming call ends the data, so that it must close the window; and whether more may come."""
        ending, more = feed.ending, feed.more
        feed.called()
        self._fed = feed
        if self._window.num_ranks > 1:
            if self._met is not feed:
                self._meet(feed, has_item=True)
            if self._window.forward_communicates:
                ending, _ = self._in_step(real=True, more=more)
        return ending and self._settings.tail != "carry", more

    def _in_step(self, *, real: bool, more: bool) -> tuple[bool, bool]:
        """Where forwards communicate, ranks agree on each micro-batch: does nobody have more? does anybody run one?"""
        with WaitingFor(self._gradients):
            rows = self._window.tell(Row(0, None, more=more, called=real))
        return not any(row.more for row in rows), any(row.called for row in rows)

    def _meet(self, feed: Feed, *, has_item: bool) -> None:
        """Hear, at the first call or the end in an `.over`, which ranks have anything at all."""
        window = self._window
        words = {"number of closed windows": self._counts["window"], "place among its function's windows": self.order}
        said = meet(
            window.group,
            f"the data of {self.name}.over",
            {
                **words,
                "more": has_item or self.index > 0,
                "items": feed.num_items,
                "can replay": has_item or self._last_call is not None,
            },
        )
        insist([{key: one[key] for key in words} for one in said])
        if window.forward_communicates and any(one["more"] for one in said):
            check_replays([one["can replay"] for one in said], self.name)
        models = [model for ref in self._models if (model := ref()) is not None]
        check_sync_batchnorm(models, [one["items"] for one in said], self.name)
        self._met = feed
        self._may_have_more = [one["more"] for one in said]
        self._uneven = len(set(self._may_have_more)) > 1

    def _end(self) -> bool:
        if self._uneven:
            with WaitingFor(lambda: f"making the buffers equal at the end of {self.name}.over"):
                self._window.share_buffers(self._last_source)
        self._uneven = False
        return False

    def _gradients(self) -> str:
        """What ranks wait for each other with, in words."""
        return f"synchronising the gradients of window {self._counts['window']} of {self.name}"

    def _agree(self, loss: torch.Tensor | LossSum | None) -> None:
        """Before the first synchronisation: nothing may differ that would make ranks wait for each other forever."""
        if self._agreed:
            return
        self._agreed = True
        settings = self._settings
        kind = None if loss is None else "a LossSum" if isinstance(loss, LossSum) else "a mean"
        words = {
            "steps": self._window.size,
            "tail": settings.tail,
            "sync": settings.sync,
            "nonfinite": settings.nonfinite,
            "clip_norm": settings.clip_norm,
            "skip": [kind.__name__ for kind in settings.skip],
        }
        said = meet(self._window.group, f"the first boundary of {self.name}", {**words, "loss": kind})
        insist([{key: one[key] for key in words} for one in said])
        insist([{"kind of loss": one["loss"]} for one in said if one["loss"] is not None] or [{}])

    @property
    def progress(self) -> Progress:
        """A record of where this stands."""
        return Progress(
            **self._counts,
            index=self.index,
            size=self._window.size,
            stepped=self._stepped,
            grad_norm=self._grad_norm,
            _losses=self._losses,
        )

