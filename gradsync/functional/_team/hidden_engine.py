"""A second engine for the same parameters, which only the body knows: seen in the first forward of a team."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradsync._errors import GradSyncError
from gradsync.engines import is_engine


class HiddenEngineWatch:
    """Context manager: inside, the forward of a wrapper that is not among the models, but has their parameters, raises.

    It would synchronise a second time; where ranks differ, while other ranks do something else.
    """

    def __init__(self, name: str, models: Iterable[nn.Module], ids: Collection[int]) -> None:
        """`ids` has the ids of the parameters that are trained."""
        self._name = name
        self._known = {id(module) for model in models for module in model.modules()}
        self._ids = ids

    def __enter__(self) -> None:
        self._hook = register_module_forward_pre_hook(self._see)  # of all modules: the body may call any

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _see(self, module: nn.Module, _: Any) -> None:
        if not is_engine(type(module)) or id(module) in self._known:
            return
        if any(id(parameter) in self._ids for parameter in module.parameters()):
            kind = type(module).__name__
            raise GradSyncError(
                f"A model on a {kind} must come to {self._name} as that {kind}, but the module inside it came, and the "
                f"body calls the {kind}: both would synchronise. Pass the {kind}, as an argument or by model=, or call "
                "the module that came."
            )
