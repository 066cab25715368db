"""While gradients travel: nobody writes to the parameters unnoticed, or saves provisional ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsync._errors import GradSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle


class Watch:
    """Watches parameters and optimizers from when it is made until `end`."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[Optimizer],
        models: Sequence[nn.Module],
        land: Callable[[], object] | None,
    ) -> None:
        self._parameters = parameters
        self._optimizers = optimizers
        self._models = models
        self._states = [(optimizer.state, optimizer.param_groups) for optimizer in optimizers]
        self._hooks: list[_LandFirst] = []
        self.note()
        if land is not None:
            modules: dict[int, Any] = {id(module): module for model in models for module in model.modules()}
            self._hooks = [_LandFirst(land, one) for one in (*modules.values(), *optimizers)]

    def note(self) -> None:
        """The parameters are as they should be."""
        self._versions = list(map(_version, self._parameters))

    def check(self) -> None:
        """Raise if somebody else has written to the parameters since `note`, or loaded an optimizer's state."""
        versions = list(map(_version, self._parameters))
        if versions != self._versions:
            pairs = zip(self._parameters, versions, self._versions, strict=True)
            written = {id(parameter) for parameter, now, before in pairs if now != before}
            raise GradSyncError(_WRITTEN.format(what=_names(self._models, written)))
        for optimizer, (state, groups) in zip(self._optimizers, self._states, strict=True):
            if optimizer.state is not state or optimizer.param_groups is not groups:
                raise GradSyncError(_WRITTEN.format(what=f"the state of {type(optimizer).__name__}"))

    def end(self) -> None:
        """Nothing travels any more: the hooks go. The one that runs stays, deaf, until this is called once more.

        Its model or optimizer goes through its hooks just then, and would not bear to lose one.
        """
        for hook in self._hooks:
            hook.end()
        self._hooks = [hook for hook in self._hooks if hook.runs]


_WRITTEN = (
    "With overlap, parameters are provisional while gradients travel, and are put back as these land. So nothing else "
    "may write to them until then, but {what} was written to. Do it in on_update, which sees the true parameters, or "
    "call settle() before it."
)


class _LandFirst:
    """A pre-hook of `state_dict`. A model that is pickled or copied meanwhile takes nothing of it along."""

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
        self._land = None
        if not self.runs:
            self._handle.remove()


class _Deaf:
    """What a copy has in the place of the hook."""

    def __call__(self, *_: object) -> None:
        """Do nothing."""


def _version(parameter: nn.Parameter) -> tuple[Any, ...]:
    """What changes as somebody writes to a parameter, or assigns its `data`."""
    return parameter._version, parameter.data_ptr(), parameter.dtype, parameter.shape


def _names(models: Sequence[nn.Module], written: set[int]) -> str:
    names = [name for model in models for name, parameter in model.named_parameters() if id(parameter) in written]
    return ", ".join(dict.fromkeys(names)) or f"{len(written)} of them"
