"""Who is asked before an optimizer steps.

torch's own table of such hooks must not change while an optimizer steps: not in another thread, and not because the
garbage collector comes by and removes a hook. So there is one hook in it, for good, and it asks from a table of ours.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradsync._state import STEP_HOOK, STEP_WATCHERS, STEPPING


class StepWatcher(Protocol):
    """Who is asked before an optimizer steps, and may raise."""

    def before_step(self, optimizer: Any) -> None:
        """The user's code is about to step this optimizer."""


def watch_steps(watcher: StepWatcher) -> None:
    """Have `watcher.before_step` called before each step of a user's, as long as somebody holds the watcher."""
    if not STEP_HOOK:
        STEP_HOOK.append(register_optimizer_step_pre_hook(_ask))
    STEP_WATCHERS[id(watcher)] = watcher


class stepping:  # noqa: N801 - a function to its callers
    """Context manager: steps inside are gradsync's own, of which nobody is told."""

    __slots__ = ()

    def __enter__(self) -> None:
        STEPPING.append(get_ident())

    def __exit__(self, *_: object) -> None:
        STEPPING.remove(get_ident())


def _ask(optimizer: Any, *_: object) -> None:
    if get_ident() in STEPPING:
        return
    for ref in STEP_WATCHERS.valuerefs():  # a list: they may come and go meanwhile, in other threads too
        watcher = ref()
        if watcher is not None:
            watcher.before_step(optimizer)
