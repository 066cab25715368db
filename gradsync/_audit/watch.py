"""The bookkeeping: backwards, synchronisations and steps, in the order in which they come.

Nothing is decided inside a backward: a hook at each parameter only notes that a backward has reached it. The engines
are asked what they have synchronised when the next backward begins, an optimizer steps, or the report is read. So it
does not matter what started a synchronisation, nor whether it ends with the backward that began it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsync._audit.backward import Backward, Clock, current_task
from gradsync._audit.counts import Counts, Missed, Stretch, Wasted
from gradsync._audit.engines import NoEngine, WatchedDDP, WatchedEngine, WatchedFSDP2, hook_gradient, rank_and_ranks
from gradsync._audit.find_engines import find_ddps, find_fsdp2
from gradsync.engines import behind


class _Account:
    """What is known of one engine since its optimizer last stepped."""

    def __init__(self, number: int, engine: WatchedEngine) -> None:
        self.number, self.engine = number, engine
        # The synchronisation that no step has used yet: why it would be wasted, and the backward that made it.
        self.pending: tuple[Wasted, Stretch | None] | None = None
        self.pending_is_strange = False
        self.was_switched_off = False


class Watch:
    """The hooks of one audit at models and optimizers, and what they count."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self.counts = Counts(*rank_and_ranks())
        self._models, self._optimizers = models, optimizers
        self._ids_of: dict[int, tuple[list[int], frozenset[int]]] = {}
        self._none = NoEngine()
        self._sharded = [WatchedFSDP2(states) for model in models if (states := find_fsdp2(model))]
        self._accounts = [_Account(number, engine) for number, engine in enumerate([self._none, *self._sharded])]
        self._ddps: list[WatchedDDP] = []
        self._versions = -1
        aliases = {one for engine in self._sharded for one in engine.ids | engine.unsharded}
        every = {id(p): p for model in models for p in model.parameters() if id(p) not in aliases}
        self._parameters = list(every.values())
        known = every.keys() | aliases
        if all(known.isdisjoint(self._ids(optimizer)) for optimizer in optimizers):
            raise ValueError(
                "audit needs the optimizer that updates the model, but none of the model's parameters is in it. "
                "Make the optimizer from the model that is audited, after fully_shard if that is used."
            )
        self._unwatched = list(self._parameters)
        self._handles: list[RemovableHandle] = []
        # What backwards have reached since the last settling.
        self._reached: list[torch.Tensor] = []
        self._reached_sharded: set[WatchedEngine] = set()
        # There is a parameter: the optimizer has it.
        some = next(chain(self._parameters, *(engine.parameters for engine in self._sharded)))
        self._backward = Backward(Clock(some.device), self._on_backward, self._reached)
        self._untimed = False
        self._active = False

    def begin(self) -> None:
        """Register the hooks."""
        self._active = True
        self._look_around()
        for engine in self._sharded:
            engine.hook(self._on_sharded)
        self._handles.extend(optimizer.register_step_pre_hook(self._on_step) for optimizer in self._optimizers)

    def end(self) -> None:
        """Remove the hooks."""
        self._active = False
        for handle in self._handles:
            handle.remove()
        for engine in self._sharded:
            engine.unhook()

    def settle(self) -> None:
        """Ask the engines what they have synchronised since the last time, and count it."""
        self._backward.leave()
        synchronised: list[tuple[_Account, int]] = []
        reached: set[int] = set()
        new = set(map(id, self._reached))
        for account in self._accounts:
            engine = account.engine
            reduced = engine.poll()
            mine = engine.ids & new
            if reduced is not None:
                synchronised.append((account, reduced))
            else:
                engine.local |= mine
            if reduced is not None or mine or engine in self._reached_sharded:
                reached.add(account.number)
        stretch = self._note_time(frozenset(reached), synchronised=bool(synchronised))
        self._reached.clear()
        self._reached_sharded.clear()
        for account, reduced in synchronised:
            self._note_synchronisation(account, reduced, stretch)

    # -- what happens ---------------------------------------------------------------------------------------------

    def _on_backward(self, first: nn.Parameter | None) -> None:
        """Begin a backward; `first` is the parameter that it has already reached, if any."""
        self.settle()
        self._look_around()
        self.counts.backwards += 1
        self._untimed = True
        for account in self._accounts:
            account.was_switched_off = account.engine.switched_off()
            if (
                account.pending is not None
                and not account.engine.travels
                and not account.engine.has_gradients(beside=first)
            ):
                self._note_cleared(account, account.pending[1])

    def _on_sharded(self, engine: WatchedEngine) -> None:
        if self._active and current_task() != -1:
            if current_task() != self._backward.task:
                self._backward.enter(None)
            self._reached_sharded.add(engine)

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.settle()
        self.counts.updates += 1
        stepped = self._ids(optimizer)
        missed: Missed | None = None
        for account in self._accounts:
            if account.engine.ids.isdisjoint(stepped):
                if account.pending is not None and account.engine.has_gradients():
                    account.pending_is_strange = True
                continue
            if missed is None and account.engine.unsynchronised(stepped):
                missed = _why_missed(account)
            account.pending = None
        if missed is not None:
            self.counts.missed[missed] += 1

    # -- what it means --------------------------------------------------------------------------------------------

    def _note_synchronisation(self, account: _Account, reduced: int, stretch: Stretch | None) -> None:
        self.counts.syncs += 1
        self.counts.bytes += reduced
        if account.pending is not None and not account.engine.travels:
            self._note_waste(*account.pending)
        account.pending, account.pending_is_strange = None, False
        # If no optimizer of this audit has the engine's parameters, a step that is not seen may use its gradients. What
        # travels (`overlap`) steps later, or is dropped as it lands.
        judged = any(not account.engine.ids.isdisjoint(self._ids(optimizer)) for optimizer in self._optimizers)
        if judged and not (account.engine.first_is_due or account.engine.travels):
            account.pending = (_why_wasted(account), stretch)
        account.engine.local.clear()

    def _note_cleared(self, account: _Account, stretch: Stretch | None) -> None:
        """Note that the gradients of the last synchronisation were cleared before a step used them."""
        if account.pending_is_strange:
            self._note_waste("left by another optimizer's backward", stretch)
        else:
            self.counts.discarded += 1
        account.pending = None

    def _note_waste(self, why: Wasted, stretch: Stretch | None) -> None:
        self.counts.wasted[why] += 1
        if stretch is not None and not stretch.wasted:
            stretch.wasted = True
            self.counts.times[stretch.engines].num_wasted += 1

    def _note_time(self, engines: frozenset[int], *, synchronised: bool) -> Stretch | None:
        backward = self._backward
        if not self._untimed or backward.ended is None:
            return None
        self._untimed = False
        stretch = Stretch(engines, backward.began, backward.computed, backward.ended)
        times = self.counts.times[engines]
        (times.synchronised if synchronised else times.held).append(stretch)
        return stretch

    # -- what there is --------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Find engines that the loop has made (gradsync makes its DDP in the first call) and what it has unfrozen."""
        for engine in self._ddps:
            if engine.behind is not None and (ddp := behind(engine.behind)) is not None:
                engine.follow(ddp)
        self._watch_unfrozen()
        if self._versions == -1 or (self._none.matters and any(p.requires_grad for p in self._none.parameters)):
            for found in find_ddps(self._models, self._ddps):
                self._ddps.append(found)
                self._accounts.append(_Account(len(self._accounts), found))
        versions = sum(account.engine.version for account in self._accounts if account.engine is not self._none)
        if versions != self._versions:
            self._versions = versions
            self._leave_rest()

    def _leave_rest(self) -> None:
        """Give `NoEngine` the parameters that no engine has."""
        held = {one for account in self._accounts if account.engine is not self._none for one in account.engine.ids}
        self._none.assign([p for p in self._parameters if id(p) not in held])

    def _watch_unfrozen(self) -> None:
        for engine in self._sharded:
            engine.hook_trainable()
        if not self._unwatched:
            return
        backward, note = self._backward, self._reached.append

        # The only thing that runs for each parameter in each backward: 0.3 us.
        def reached(parameter: torch.Tensor) -> None:
            if current_task() != backward.task:
                backward.enter(parameter)
            note(parameter)

        new = [p for p in self._unwatched if p.requires_grad]
        self._unwatched = [p for p in self._unwatched if not p.requires_grad]
        self._handles.extend(hook_gradient(p, reached) for p in new)

    def _ids(self, optimizer: Optimizer) -> frozenset[int]:
        """Return the ids of the optimizer's parameters, read again when a group has grown."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        known = self._ids_of.get(id(optimizer))
        if known is None or known[0] != sizes:
            known = (sizes, frozenset(id(p) for group in optimizer.param_groups for p in group["params"]))
            self._ids_of[id(optimizer)] = known
        return known[1]


def _why_wasted(account: _Account) -> Wasted:
    if account.engine.kind == "fsdp2":
        return "not held, sharded"
    return "forward not held" if account.was_switched_off else "not held"


def _why_missed(account: _Account) -> Missed:
    if account.engine.kind == "none":
        return "no engine"
    if account.pending is not None:
        return "too early" if account.was_switched_off else "flag after forward"
    if account.engine.kind == "fsdp2":
        return "held, sharded"
    return "held" if account.was_switched_off else "bypassed"
