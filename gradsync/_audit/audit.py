"""`audit`: a context manager around any training loop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from gradsync._audit.report import AuditReport
from gradsync._audit.watch import Watch
from gradsync._errors import GradSyncError
from gradsync.ranks.group import require_group

_USE = "Use it as `with gradsync.audit(model, optimizer) as report:`, around the loop, and ask the report."


def audit(model: nn.Module | Iterable[nn.Module], optimizer: Optimizer | Iterable[Optimizer]) -> AuditContext:
    """Watch the loop inside, and tell whether it synchronises its gradients when it should, and only then.

    `model` is what the loop calls: the module on its engine, compiled or not, or several (a GAN's two). `optimizer` is
    what steps it, or several. The loop may be anybody's: by hand, Accelerate's, Fabric's, gradsync's. It is not
    changed, and everything is as it was afterwards, also when the loop raises; audits nest.

    The report can be read inside the loop too. It counts `backwards`, `syncs` (one for each engine whose gradients a
    backward synchronised), `updates` (optimizer steps), `bytes` (of gradients synchronised: under FSDP2 in the type in
    which it reduces them, under DDP in their own, before a communication hook or `compress` makes them smaller),
    `wasted` (synchronisations that were followed by another one before the optimizer stepped) and `missed` (optimizer
    steps on gradients that were not synchronised). Gradients that were synchronised and then cleared without
    a step, as under a GradScaler that skips, are `discarded`, and no fault. Printing it gives a table and advice;
    `check()` raises the advice as a `GradSyncError`. Nothing here communicates: the report is this rank's.

        >>> import torch, gradsync
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with gradsync.audit(model, optimizer) as report:
        ...     for _ in range(4):
        ...         model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> report.backwards, report.syncs, report.updates
        (4, 0, 1)
        >>> report.check()
    """
    models = _several("model", "nn.Module", model, nn.Module)
    optimizers = [_innermost(one) for one in _several("optimizer", "torch.optim.Optimizer", optimizer, Optimizer)]
    require_group("audit")
    return AuditContext(models, optimizers)


class AuditContext:
    """What `audit` returns: a context manager that gives the `AuditReport`."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._models, self._optimizers = models, optimizers
        self._entered: list[tuple[Watch, AuditReport]] = []

    def __enter__(self) -> AuditReport:
        watch = Watch(self._models, self._optimizers)
        report = AuditReport(watch.counts, watch.settle)
        try:
            watch.begin()
        except BaseException:
            _end(watch, report)
            raise
        self._entered.append((watch, report))
        return report

    def __exit__(self, *_: object) -> None:
        _end(*self._entered.pop())

    def __repr__(self) -> str:
        return f"<gradsync.audit(model, optimizer), which counts in its with block and tells in the report. {_USE}>"

    if not TYPE_CHECKING:  # a type checker should go on to reject every attribute

        def __getattr__(self, name: str) -> Any:
            if hasattr(AuditReport, name):
                raise GradSyncError(
                    f"gradsync.audit(model, optimizer) has no {name}: what it counts is in its report. {_USE}"
                )
            raise AttributeError(f"gradsync.audit(model, optimizer) has no attribute {name!r}. {_USE}")


def _end(watch: Watch, report: AuditReport) -> None:
    try:
        watch.settle()
    finally:
        watch.end()
        report._close(time.perf_counter())


def _several(name: str, needed: str, given: Any, kind: type[Any]) -> list[Any]:
    if isinstance(given, kind):
        return [given]
    several = list(given) if hasattr(given, "__iter__") else [given]
    for one in several:
        if not isinstance(one, kind):
            raise TypeError(
                f"audit needs a {needed} as its {name}, or several, but got a {type(one).__qualname__}. Call it as "
                "audit(model, optimizer), with a tuple where there are several."
            )
    if not several:
        raise ValueError(f"audit needs at least one {name}, but got none.")
    return several


def _innermost(optimizer: Optimizer) -> Optimizer:
    # Accelerate's and Fabric's wrappers are Optimizers themselves, but only the one inside runs step hooks.
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer) and inner is not optimizer:
        optimizer = inner
    return optimizer
