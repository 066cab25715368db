"""The state of a decorated function: saved, checked and loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync._errors import GradSyncError
from gradsync.decorator.call_runner import CallRunner
from gradsync.decorator.progress import Progress
from gradsync.functional import Run, Steps, Team, is_scaling, window_size

VERSION = 2
_NUMBERS = ("micro_steps", "updates", "window", "skipped", "dropped", "replays", "index", "size")

# Names under which FSDP1, activation checkpointing and torch.compile keep the module that they wrap.
_WRAPPED = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}


def windows_in(state: object, name: str, steps: Steps) -> list[dict[str, Any]]:
    """The states of a function's windows, in the order of their first call.

    Raises if one was saved with other steps. If `steps` is a function, only an open window can be checked.
    """
    version = state.get("version") if isinstance(state, dict) else None
    if not isinstance(state, dict) or version != VERSION:
        raise ValueError(
            f"load_state_dict needs what state_dict of a decorated function returned, version {VERSION}, but what came "
            + (f"has version {version!r}." if isinstance(state, dict) else f"is of type {type(state).__name__}.")
        )
    for one in state["windows"]:
        saved, here = one["steps"], steps
        if one["index"]:
            saved, here = one["size"], window_size(steps, one["window"])
        if isinstance(saved, int) and isinstance(here, int) and saved != here:
            raise _misfit(
                f"A state of {name} can be loaded with the steps that it was saved with, {saved}, but there are "
                f"{here}. Use the same"
            )
    return list(state["windows"])


def progress_in(state: Mapping[str, Any]) -> Progress:
    """The progress in a state that is not used yet."""
    return Progress(**{name: state[name] for name in _NUMBERS})


def save(runner: CallRunner) -> dict[str, Any]:
    """The counters, and the content of the open window, as plain values."""
    run, progress = runner.run, runner.reporter.progress
    team, names, steps = run.fitting_team(), _names_of(run), run.terms.steps
    state: dict[str, Any] = {
        **{name: getattr(progress, name) for name in _NUMBERS},
        "steps": steps if isinstance(steps, int) else None,
        "num_ranks": team.num_ranks,
        "rank": team.rank,
        "parameters": {name: list(parameter.shape) for name, parameter in names.items()},
        "forms": {name: _form(parameter) for name, parameter in names.items()},
    }
    if run.window is not None and run.index:
        held = team.held_gradients()
        state["open"] = {
            **run.window.state(),
            "gradients": {name: held[p].detach().clone() for name, p in names.items() if p in held},
        }
    return state


def check(run: Run, state: Mapping[str, Any]) -> None:
    """Raise if a state belongs to other models or ranks. It does not communicate, if there is a team."""
    team, names = run.fitting_team(), _names_of(run)
    if state["num_ranks"] != team.num_ranks:
        raise _misfit(
            f"A state of {run.name} can be loaded on as many ranks as it was saved on, {state['num_ranks']}, but there "
            f"are {team.num_ranks}. Start that many"
        )
    if state["index"] and state["rank"] != team.rank:
        raise _misfit(
            f"A state of {run.name} in the middle of a window holds the gradients of the rank that saved it, rank "
            f"{state['rank']}, but it is loaded on rank {team.rank}: they would count twice. Save a state on each "
            "rank, and load each rank's own"
        )
    if odd := _differing(state["parameters"], {name: list(parameter.shape) for name, parameter in names.items()}):
        raise _misfit(
            f"A state of {run.name} can be loaded for the parameters that it was saved for, names and shapes, but "
            f"these differ in {odd}. Call it with the same models and optimizers"
        )
    if state["index"] and (odd := _differing(state["forms"], {name: _form(one) for name, one in names.items()})):
        raise _misfit(
            f"A state of {run.name} in the middle of a window can be loaded for parameters that are as they were then, "
            f"in their dtype and in whether they are frozen, but these differ in {odd}. Change that between windows"
        )


def load(runner: CallRunner, state: Mapping[str, Any]) -> None:
    """Load a state, if it fits."""
    run = runner.run
    # To make an engine copies the buffers of rank 0, but mid-window each rank has its own.
    models = run.who.models if state["index"] else []
    buffers = [(buffer, buffer.clone()) for model in models for buffer in model.buffers()]
    team = run.fitting_team()
    with torch.no_grad():
        for buffer, own in buffers:
            buffer.copy_(own)
    check(run, state)
    runner.discard()
    runner.reporter.go_on_from(progress_in(state))
    try:
        if state["index"]:
            _open(runner, team, state)
    except BaseException:  # it may be loaded again: nothing has come of it
        runner.discard()
        runner.reporter.go_on_from(Progress())
        raise


def without_window(state: dict[str, Any]) -> dict[str, Any]:
    """The state, with its open window discarded."""
    return {name: value for name, value in state.items() if name != "open"} | {"index": 0}


def _open(runner: CallRunner, team: Team, state: Mapping[str, Any]) -> None:
    """Open the window that a state holds, with its gradients."""
    run, names = runner.run, _names_of(runner.run)
    window = run.open(team)
    window.load(state["open"], state["index"])
    scales = is_scaling(runner.updater.scaler())
    if window.num_micro_batches and scales != (window.scale is not None):
        raise _misfit(
            f"A state of {run.name} in the middle of a window can be loaded with a GradScaler if it was saved with "
            f"one, and without one if not, but it was saved with {'none' if scales else 'one'}. Pass the same"
        )
    held = state["open"]["gradients"]
    team.load_held({names[name]: gradient.to(names[name].device).clone() for name, gradient in held.items()})
    runner.body.watch(team)
    runner.body.remember()


def _differing(saved: Mapping[str, object], here: Mapping[str, object]) -> str:
    """The names at which these differ, for an error; empty if there are none."""
    odd = sorted(name for name in {**saved, **here} if saved.get(name) != here.get(name))
    return f"{', '.join(odd[:5])}{' and others' if len(odd) > 5 else ''}"


def _form(parameter: nn.Parameter) -> list[object]:
    return [str(parameter.dtype), parameter.requires_grad]


def _misfit(text: str) -> GradSyncError:
    return GradSyncError(f"{text}; or, if it was saved at a boundary, go on without it: it then holds counters only.")


# -- names ------------------------------------------------------------------------------------------------------------


def names_without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Each parameter's name without wrappers' names, unless two parameters would get the same name."""
    own = {}
    for name in names:
        *modules, last = name.split(".")
        own[name] = ".".join([*(module for module in modules if module not in _WRAPPED), last])
    count = Counter(own.values())
    return {name: short if count[short] == 1 else name for name, short in own.items()}


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module in `DistributedDataParallel` and `torch.compile`."""
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model


def _names_of(run: Run) -> dict[str, nn.Parameter]:
    """The parameters by their names: the same however the model is wrapped."""
    models, team = run.who.models, run.fitting_team()
    mine = {id(parameter): parameter for parameter in team.parameters}
    # Do not call `ungather` here: a rank that saves alone would wait alone in the gather of its next forward.
    for engine in team.engines:
        mine.update((id(stand_in), parameter) for stand_in, parameter in engine.gathered.items())
    names: dict[str, nn.Parameter] = {}
    for place, model in enumerate(models):
        inside = dict(_unwrapped(model).named_parameters())
        for name, own in names_without_wrappers(inside).items():
            if id(inside[name]) in mine:
                names[f"{place}.{own}" if len(models) > 1 else own] = mine[id(inside[name])]
    named = set(map(id, names.values()))
    # Parameters of the optimizers that are in no model, in the optimizers' order.
    others = [parameter for parameter in team.parameters if id(parameter) not in named]
    return names | {f"optimizer parameter {place}": parameter for place, parameter in enumerate(others)}
