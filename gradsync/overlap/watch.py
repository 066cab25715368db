"""Notices writes to the parameters while gradients travel, and keeps provisional ones from being saved.

Private in torch (read in torch 2.13; tests/overlap/test_in_flight.py fails when it changes): `_state_dict_pre_hooks` of
a module and `_optimizer_state_dict_pre_hooks` of an optimizer, where their hooks are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsync._errors import GradSyncError
from gradsync.functional import Who


class Watch:
    """Watches parameters and optimizers, from its construction until `end`."""

    def __init__(self, parameters: Sequence[nn.Parameter], who: Who, land: Callable[[], object] | None) -> None:
        """`who` has the models, for their names and their `state_dict`, and the optimizers."""
        self._parameters = parameters
        self._who = who
        self._states = [_State(weakref.ref(one), one.state, one.param_groups) for one in who.optimizers]
        self._dtypes = [parameter.dtype for parameter in parameters]  # the gradients that travel can land on these only
        self._hooks: list[_LandFirst] = []
        self.note()
        if land is not None:
            modules: dict[int, Any] = {id(module): module for model in who.models for module in model.modules()}
            watched = (*modules.values(), *who.optimizers)
            _remove_ended(watched)
            self._hooks = [_LandFirst(land, one) for one in watched]

    def note(self) -> None:
        """Take the parameters and the optimizers' states as they are now for right."""
        self._marks = [_Mark.of(parameter) for parameter in self._parameters]
        self._held = [list(_values(one.state)) for one in self._states]

    def check(self) -> None:
        """Raise if somebody else has written to the parameters since `note`, or to an optimizer's state."""
        written = {
            id(parameter)
            for parameter, mark, dtype in zip(self._parameters, self._marks, self._dtypes, strict=True)
            if parameter.dtype != dtype or not mark.is_of(parameter)
        }
        if written:
            raise GradSyncError(_WRITTEN.format(what=_names(self._who.models, written)))
        for one, held in zip(self._states, self._held, strict=True):
            optimizer = one.optimizer()
            if optimizer is not None and not one.is_as(optimizer, held):
                raise GradSyncError(_WRITTEN.format(what=f"the state of {type(optimizer).__name__}"))

    def end(self) -> None:
        """Nothing travels any more: remove the hooks.

        A hook that is running stays, without effect, until `end` or the next watch: its model or optimizer is iterating
        over its hooks, and must not lose one meanwhile.
        """
        for hook in self._hooks:
            hook.end()
        self._hooks = [hook for hook in self._hooks if hook.runs]


_WRITTEN = (
    "With overlap, parameters are provisional while gradients travel, and are put back as these land. So nothing else "
    "may write to them until then, but {what} was written to. Do it in on_update, which sees the true parameters, or "
    "call settle() before it."
)


class _Mark(NamedTuple):
    """Where a parameter's values are, and how often they had been written to.

    A write through `parameter.data` does not count. Assigning another tensor to `data` changes the memory.
    """

    version: int
    alias: torch.Tensor  # keeps that memory, so that no other tensor can be in it
    place: int

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Mark:
        alias = parameter.detach()
        return cls(parameter._version, alias, _place(alias))

    def is_of(self, parameter: nn.Parameter) -> bool:
        """Whether nobody has written to it since."""
        alias = self.alias
        alike = (parameter.dtype, parameter.device, parameter.shape) == (alias.dtype, alias.device, alias.shape)
        return alike and parameter._version == self.version and _place(parameter.detach()) == self.place


class _State(NamedTuple):
    """An optimizer, and the containers that are put back into it."""

    optimizer: weakref.ref[Optimizer]
    state: Any
    groups: Any

    def is_as(self, optimizer: Optimizer, held: Sequence[_Value]) -> bool:
        """Whether its state is the one that `held` was read from, and holds the same."""
        if optimizer.state is not self.state or optimizer.param_groups is not self.groups:
            return False
        now = list(_values(self.state))
        return len(now) == len(held) and all(map(_Value.is_same, now, held))


class _Value(NamedTuple):
    """Something that an optimizer's state holds."""

    owner: Any
    name: Any
    value: Any
    version: int

    def is_same(self, other: _Value) -> bool:
        one = self.owner is other.owner and self.name == other.name and self.value is other.value
        return one and self.version == other.version


def _values(state: Any) -> Iterator[_Value]:
    """What the state of each parameter holds; what is nested deeper is not looked at."""
    for owner, entry in state.items():
        for name, value in entry.items() if isinstance(entry, dict) else ():
            yield _Value(owner, name, value, value._version if isinstance(value, torch.Tensor) else 0)


def _place(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass without a storage of its own
        return 0


class _LandFirst:
    """A pre-hook of `state_dict` that lands first. In a copied or pickled model, it does nothing."""

    def __init__(self, land: Callable[[], object], one: nn.Module | Optimizer) -> None:
        self._land: Callable[[], object] | None = land
        self.runs = False
        register: Any = one.register_state_dict_pre_hook
        self._handle: RemovableHandle = register(self)

    def __call__(self, *_: object) -> None:
        if self._land is None:
            return
        self.runs = True
        try:
            self._land()
        finally:
            self.runs = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _Deaf, ()

    def end(self) -> None:
        """Have no effect any more, and be gone unless it runs."""
        self._land = None
        self.remove_ended()

    def remove_ended(self) -> None:
        """Be gone if it has ended and does not run."""
        if self._land is None and not self.runs:
            self._handle.remove()


def _remove_ended(watched: Iterable[Any]) -> None:
    """Remove the hooks of earlier watches that ran as they ended: saving model after model would leave many."""
    for one in watched:
        hooks = one._state_dict_pre_hooks if isinstance(one, nn.Module) else one._optimizer_state_dict_pre_hooks
        for hook in [hook for hook in hooks.values() if isinstance(hook, _LandFirst)]:
            hook.remove_ended()


class _Deaf:
    """What a copied or pickled model has in place of the hook."""

    def __call__(self, *_: object) -> None:
        """Do nothing."""


def _names(models: Sequence[nn.Module], written: set[int]) -> str:
    names = [name for model in models for name, parameter in model.named_parameters() if id(parameter) in written]
    return ", ".join(dict.fromkeys(names)) or f"{len(written)} of them"
