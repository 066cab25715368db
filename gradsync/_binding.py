"""The participants of an `Accumulation`, held weakly, and what follows from them: the window that they share."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from gradsync._errors import GradSyncError
from gradsync._state import own_names, unwrapped
from gradsync.engines import attach, find, rest
from gradsync.functional._agreement import agree_on_model
from gradsync.functional._bystanders import Bystanders
from gradsync.functional._lost import WaitingFor
from gradsync.functional._open_window import OpenWindow
from gradsync.functional._update import owned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from gradsync._cast import Cast
    from gradsync._settings import Settings


class Binding:
    """Who took part in the last call. Who drops a model and its optimizer drops this."""

    def __init__(self, name: str, settings: Settings, cast: Cast) -> None:
        self._name = name
        self._settings = settings
        self._participants: list[weakref.ref[Any]] = []
        self._optimizers = [weakref.ref(optimizer) for optimizer in cast.optimizers]
        self._schedulers: list[weakref.ref[LRScheduler]] = []
        self._scaler: weakref.ref[GradScaler] | None = None
        self._look_at(cast)

    def has(self, participants: Sequence[object]) -> bool:
        """Whether these are the participants of the last call: by identity, which is quick."""
        refs = self._participants
        if len(refs) != len(participants):
            return False
        for ref, one in zip(refs, participants):  # noqa: B905, SIM110 - in every call: neither strict= nor all() is free
            if ref() is not one:
                return False
        return True

    def renew(self, cast: Cast, participants: Sequence[object], *, is_open: bool) -> bool:
        """Take note of a call's participants; whether the models are others than before."""
        changed = len(cast.models) != len(self.model_refs) or any(
            ref() is not model for ref, model in zip(self.model_refs, cast.models, strict=True)
        )
        if changed:
            if is_open:
                raise GradSyncError(
                    f"{self._name} must be called with the same models throughout a window, but they changed in the "
                    "middle of one. Call flush() before another model comes."
                )
            self._look_at(cast)
        self._participants = [weakref.ref(one) for one in participants]
        self._schedulers = [weakref.ref(scheduler) for scheduler in cast.schedulers]
        self._scaler = None if cast.scaler is None else weakref.ref(cast.scaler)
        return changed

    @property
    def models(self) -> list[nn.Module]:
        """Those that are alive."""
        return [model for ref in self.model_refs if (model := ref()) is not None]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that are alive."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    @property
    def schedulers(self) -> list[LRScheduler]:
        """Those that are alive."""
        return [scheduler for ref in self._schedulers if (scheduler := ref()) is not None]

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler, if there is one."""
        return None if self._scaler is None else self._scaler()

    def names(self) -> dict[str, nn.Parameter]:
        """The parameters by their names: the same however the model is wrapped."""
        models, parameters = self.models, self.window.parameters
        mine = {id(parameter): parameter for parameter in parameters}
        # After `rest`, a rank that is asked alone would wait alone for its next forward's gather.
        for engine in self.window.engines:
            mine.update((id(stand_in), parameter) for stand_in, parameter in engine.gathered.items())
        several = len(models) > 1
        names: dict[str, nn.Parameter] = {}
        for place, model in enumerate(models):
            inside = dict(unwrapped(model).named_parameters())
            for name, own in own_names(inside).items():
                if id(inside[name]) in mine:
                    names[f"{place}.{own}" if several else own] = mine[id(inside[name])]
        named = set(map(id, names.values()))
        # What the optimizers have besides, in their order.
        others = [parameter for parameter in parameters if id(parameter) not in named]
        return names | {f"optimizer parameter {place}": parameter for place, parameter in enumerate(others)}

    def _look_at(self, cast: Cast) -> None:
        """Tell trained models from bystanders, and make the window of the trained."""
        rest(cast.models)
        mine = {id(parameter) for parameter in owned(cast.optimizers)}
        trained = [model for model in cast.models if any(id(p) in mine for p in model.parameters())]
        if not trained:
            raise GradSyncError(
                f"At least one model must have parameters in the optimizer, but none that {self._name} was called with "
                "has. Make the optimizer from the parameters of the model that it is called with."
            )
        inside = {id(module) for model in trained for module in model.modules() if module is not model}
        trained = [model for model in trained if id(model) not in inside]
        parameters = dict.fromkeys(p for model in trained for p in model.parameters())
        parameters.update(dict.fromkeys(owned(cast.optimizers)))
        watching = [model for model in cast.models if not any(p in parameters for p in model.parameters())]
        with WaitingFor(lambda: f"the first call of {self._name}, which makes the models equal"):
            engines = attach(trained, agree_on_model)
        self.ids = frozenset(map(id, parameters))
        self.unowned = [parameter for parameter in parameters if id(parameter) not in mine]
        self.window = OpenWindow(
            engines,
            list(parameters),
            Bystanders([p for model in watching for p in model.parameters()], find(watching)),
            shards=self._settings.sync == "shard",
            tell_after=bool(self._settings.skip),
            tell_size=callable(self._settings.steps),
        )
        self.model_refs = tuple(weakref.ref(model) for model in cast.models)
