"""`Team`: the engines, ranks and parameters that take part in windows, until one of these changes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, ne
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradsync._errors import GradSyncError
from gradsync.engines import attach, find, is_compiled, twins_of, ungather
from gradsync.functional._team.hidden_engine import HiddenEngineWatch
from gradsync.functional._team.hold import Bystanders, Hold
from gradsync.functional._team.model_changes import ModelsAsTheyWere
from gradsync.functional._update.contexts import both
from gradsync.functional._update.gradients import discard, is_there
from gradsync.functional._update.optimizers import owned
from gradsync.ranks.group import require_group
from gradsync.ranks.lost import WaitingFor
from gradsync.ranks.meet import insist, meet
from gradsync.ranks.tables import Tables


class Team:
    """The engines, ranks and parameters of windows. `fits` says whether they are still those of the models.

    All parameters of the trained `models` and of `optimizers` are in it. A model none of whose parameters belong to the
    optimizers is a bystander: it is held, and never synchronised. Without optimizers, all models are trained.

    To make a team is collective on several ranks: what is in no engine gets DDP behind it.
    """

    def __init__(
        self,
        name: str,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer] = (),
        *,
        sync: str = "window",
        before: Team | None = None,
    ) -> None:
        require_group(name)
        self.name = name
        self._ungather(models, optimizers)
        self.is_new = True  # whether no micro-batch of it has run
        self.kind: float | None = None  # of losses, once the ranks have compared it in words
        self.seeds: dict[Any, torch.Tensor] = {}  # the gradients that backwards begin with, by what they depend on
        mine = owned(optimizers)
        ids = set(map(id, mine))
        stepped = [m for m in models if not optimizers or any(id(p) in ids for p in m.parameters())]
        if not stepped:
            raise GradSyncError(_no_model(name, models, optimizers))
        inside = {id(module) for model in stepped for module in model.modules() if module is not model}
        trained = [model for model in stepped if id(model) not in inside]
        self.parameters = list(dict.fromkeys([*(p for model in trained for p in model.parameters()), *mine]))
        self.in_models = {id(p) for model in trained for p in model.parameters()}
        self.ids = frozenset(map(id, self.parameters))
        self.unowned = [p for p in self.parameters if id(p) not in ids] if optimizers else []
        self._insist_on_models(mine, set() if before is None else before.in_models)
        watching = [m for m in models if not any(m is one for one in stepped)]
        with WaitingFor(lambda: f"the first window of {name}, which makes the models equal"):
            engines = attach(trained, mine, lambda *those: _agree(name, *those))
        held = [p for m in watching for p in m.parameters() if id(p) not in self.ids]
        self._set_engines(engines, Bystanders(held, [one for one in find(watching) if one not in engines]), sync)
        self._models_then = ModelsAsTheyWere(models, optimizers, self.ids, emptied=self._emptied())
        self._flags = [*map(_FLAG, self.parameters)]
        self.has_sync_batchnorm = any(isinstance(m, nn.SyncBatchNorm) for model in models for m in model.modules())

    def _insist_on_models(self, mine: Sequence[nn.Parameter], before: Collection[int]) -> None:
        """Raise where parameters of the optimizer are no longer in a model, and others came that nobody steps.

        A layer that was taken out, or was replaced in the optimizer too, is no mistake. `before` has the ids of those
        that were in models then.
        """
        gone = [parameter for parameter in mine if id(parameter) not in self.in_models and id(parameter) in before]
        came = self.in_models.difference(before, map(id, mine))
        if gone and any(parameter.requires_grad and id(parameter) in came for parameter in self.parameters):
            raise GradSyncError(
                f"The optimizer of {self.name} steps {len(gone)} parameters that its models no longer have, of shape "
                f"{', '.join(str(list(p.shape)) for p in gone[:3])}: they were replaced (a new layer, a "
                "parametrization, load_state_dict(assign=True)), and what took their place is not trained. Make the "
                "optimizer anew from model.parameters()."
            )

    def _set_engines(self, engines: Sequence[Any], bystanders: Bystanders, sync: str) -> None:
        communicates = [engine.forward_communicates for engine in engines]
        # The largest first: it synchronises while the backward runs, the others after it.
        self.engines = engines if any(communicates) else sorted(engines, key=_num_elements, reverse=True)
        self.group: dist.ProcessGroup | None = engines[0].group if engines else None
        self.tables = Tables(self.group, self.parameters)
        self.num_ranks, self.rank = self.tables.num_ranks, self.tables.rank
        beside = {id(p) for engine in bystanders.engines for p in engine.parameters}
        loose = [*self.bare, *(p for p in bystanders.parameters if id(p) not in beside)]
        # The ranks that run each forward of a part of the model together: tensor parallelism.
        self.twins = [*(group for engine in engines for group in engine.twins), *twins_of(loose)]
        self.hold = Hold([*engines, bystanders] if bystanders else engines, sync)
        self.forward_communicates = any(communicates) or bystanders.forward_communicates
        # Whether the ranks that are averaged must run each micro-batch together: their forwards wait for each other.
        self.lockstep = self.forward_communicates and self.num_ranks > 1
        self.is_alone = self.num_ranks == 1 and not self.twins
        # Whether a loop must see to it that all ranks come to the same micro-batches.
        self.goes_together = self.lockstep or bool(self.twins)
        # The ranks over which plain gradients lie in pieces, by the id of the parameter: norms take all pieces.
        self.spread: Mapping[int, Any] = {id(p): engine.shard_group for engine in engines for p in engine.in_pieces}
        self.holds_inside = any(engine.holds_inside for engine in engines)
        moving = {id(p) for engine in engines if engine.swaps_storage for p in engine.parameters}
        # Those that a watch looks at: not those without an optimizer, nor those whose gradient is another object later.
        moving |= set(map(id, self.unowned))
        self.watchable = [parameter for parameter in self.parameters if id(parameter) not in moving]
        self._gathering = [engine for engine in (*engines, *bystanders.engines) if engine.holds_inside]

    def first_hold(self, name: str, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """`hold`, for the first micro-batch: it also looks for engines that only the body knows."""
        self.is_new = False
        # torch.compile would compile once more for the hook of this watch.
        compiled = any(is_compiled(module) for model in models for module in model.modules())
        if self.num_ranks == 1 or compiled:
            return self.hold
        return both(HiddenEngineWatch(name, models, self.ids), self.hold)

    def fits(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer] = ()) -> bool:
        """Whether models and optimizers are as they were. Asked when a window opens."""
        if self.holds_inside:
            self._ungather(models, optimizers)
        return self._change(models, optimizers, {}) is None

    def _ungather(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Put parameters back where a forward has left gathered ones. Raise for an optimizer that was made of these."""
        gathered = set(map(id, ungather(models)))
        if gathered and (num_stale := len(gathered.intersection(map(id, owned(optimizers))))):
            raise made_from_gathered(self.name, num_stale)

    def close(self) -> None:
        """A window has closed: between windows, `model.parameters()` are those of the optimizers."""
        for engine in self._gathering:
            engine.ungather()

    def check(self, name: str, models: Sequence[nn.Module], optimizers: Sequence[Optimizer] = ()) -> None:
        """Raise unless models and optimizers are as they were when the open window was opened."""
        what = self._change(models, optimizers, self._gathered())
        if what is not None:
            raise GradSyncError(_CHANGED.format(name=name, what=what))

    def _change(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], gathered: Mapping[Any, nn.Parameter]
    ) -> str | None:
        """What is no longer as it was, in words; None if it is nothing that an engine minds."""
        what = self._models_then.change(models, optimizers, self._emptied, gathered)
        if what is None:
            for engine in self.engines:  # asked twice a window, where a generator would cost more
                if not engine.is_wired():
                    return "parameters were cast, though perhaps back again, or got another storage or memory format"
        return what

    def _gathered(self) -> Mapping[Any, nn.Parameter]:
        return {tensor: own for one in self._gathering for tensor, own in one.gathered.items()}

    def _emptied(self) -> set[nn.Module]:
        return {module for engine in self._gathering for module in engine.emptied}

    def check_trainable(self, name: str) -> None:
        """Raise if `requires_grad` of a parameter has changed since the window was opened; cheap, for each call."""
        now = [*map(_FLAG, self.parameters)]
        if self.holds_inside and now == self._flags:  # gathered tensors may have been switched in place of parameters
            gathered = {id(own): tensor.requires_grad for one in self.engines for tensor, own in one.gathered.items()}
            now = [gathered.get(id(p), flag) for p, flag in zip(self.parameters, now, strict=True)]
        if now != self._flags:
            changed = sum(map(ne, now, self._flags))
            raise GradSyncError(_CHANGED.format(name=name, what=f"requires_grad of {changed} parameters is another"))

    @property
    def bare(self) -> list[nn.Parameter]:
        """The parameters that are in no engine."""
        covered = {id(p) for engine in self.engines for p in engine.parameters}
        return [p for p in self.parameters if id(p) not in covered]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors at which gradients arrive, for hooks: parameters, or what an engine has gathered of them."""
        return [*self.bare, *(leaf for engine in self.engines for leaf in engine.leaves)]

    @property
    def swapped(self) -> set[int]:
        """The ids of those leaves whose nodes in the graph nobody may hold."""
        return {id(leaf) for engine in self.engines if engine.swaps_storage for leaf in engine.leaves}

    def num_inside(self) -> int:
        """How many gradients engines hold elsewhere than at parameters."""
        return sum(engine.num_held() for engine in self.engines if engine.holds_inside)

    def gradients_left(self) -> tuple[int, int]:
        """How many parameters have a gradient that is not all zeros, which waits for a device; and `num_inside`."""
        return sum(is_there(parameter.grad) for parameter in self.parameters), self.num_inside()

    def drop_gradients(self) -> None:
        """Discard what is accumulated, inside engines too."""
        for engine in self.engines:
            engine.discard()
        discard(self.parameters)

    def held_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """The gradients that this rank holds, by parameter; not copies."""
        held = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
        for engine in self.engines:
            held |= engine.held_gradients()
        return held

    def load_held(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Put held gradients into a window that has just been opened."""
        for engine in self.engines:
            engine.load_held(gradients)
        for parameter in self.bare:
            parameter.grad = gradients.get(parameter)


_FLAG = attrgetter("requires_grad")  # for `map`, which is three times as fast as a comprehension

_CHANGED = (
    "The participants of {name} must stay the same within a window, but they changed in the middle of one ({what}). "
    "Make such a change between windows, and not in the body of a call or of the loop. With accumulating, that is "
    "where progress.index is 0, or after flush() or reset()."
)


def made_from_gathered(name: str, num_stale: int) -> GradSyncError:
    """The error for an optimizer of such tensors: a step of it trains nothing."""
    return GradSyncError(
        f"The optimizers of {name} must step the model's own parameters, but {num_stale} of theirs are tensors that "
        "FSDP had gathered for a forward, and will throw away. Make the optimizer before any forward, or (FSDP2) right "
        "after model.reshard()."
    )


def _num_elements(engine: Any) -> int:
    return sum(parameter.numel() for parameter in engine.parameters)


def _no_model(name: str, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> str:
    if not models:
        return (
            f"The models of {name} must be alive as long as it has windows to open or to close, but those that it was "
            "called with are gone, and so are their parameters. Keep a reference to the model, or call flush() and "
            "reset() before it goes."
        )
    return (
        f"At least one model must have parameters in the optimizer, but none that {name} was called with has: not "
        f"{', '.join(type(model).__name__ for model in models)} in "
        f"{', '.join(type(one).__name__ for one in optimizers)}. Make the optimizer from the parameters that the model "
        "has now: after load_state_dict(assign=True), a new head or an adapter they are others. A parameter of no "
        "module comes as nn.ParameterList([parameter])."
    )


_Named: TypeAlias = Sequence[tuple[str, torch.Tensor]]


def _agree(name: str, group: dist.ProcessGroup | None, parameters: _Named, buffers: _Named) -> None:
    """Raise on every rank if the ranks' trainable parameters or buffers differ."""
    words = {"trainable parameters": _in_words(parameters), "buffers": _in_words(buffers)}
    insist(meet(dist.group.WORLD if group is None else group, f"the first window of {name} with these models", words))


def _in_words(named: _Named) -> str:
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]
    elements = sum(math.prod(shape) for _, shape, _ in shapes)
    return f"{len(shapes)} of {elements} elements (names, shapes and dtypes hash to {digest})"
