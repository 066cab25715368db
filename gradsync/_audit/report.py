"""What the audit found, in numbers and in words."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from gradsync._audit.backward import Clock
from gradsync._audit.counts import Counts, Missed, Times, Wasted
from gradsync._errors import GradSyncError

_WASTED: dict[Wasted, str] = {
    "not held": (
        "{n} of {syncs} were wasted: another one followed before the optimizer stepped. Run forward and backward of "
        "every micro-batch but the last of a window under no_sync."
    ),
    "forward not held": (
        "{n} of {syncs} were wasted: another one followed before the optimizer stepped, and no_sync was around the "
        "backward alone. DistributedDataParallel decides in its forward: put the forward inside no_sync as well."
    ),
    "not held, sharded": (
        "{n} of {syncs} were wasted: another one followed before the optimizer stepped. Call "
        "model.set_requires_gradient_sync(False) before every micro-batch but the last of a window, and with True "
        "before the last, if memory has room for the full gradients."
    ),
    "left by another optimizer's backward": (
        "{n} of {syncs} were wasted: another model's backward left the gradients there, and they were cleared before "
        "their own optimizer stepped. Switch requires_grad off in this model, or put it under no_sync, while the other "
        "one trains."
    ),
}

_MISSED: dict[Missed, str] = {
    "no engine": (
        "{n} of {updates} used gradients that no engine synchronises, on {ranks} ranks. Wrap the model in "
        "DistributedDataParallel, after unfreezing what is to be trained, and hand audit the wrapper, not the module "
        "inside it. A loop or an optimizer that all-reduces gradients by itself is not seen."
    ),
    "held": (
        "{n} of {updates} used gradients that were held back: no micro-batch of the window synchronised. The last one "
        "before a step must run outside no_sync, also where the data ends with a short window."
    ),
    "too early": (
        "{n} of {updates} used gradients that were held back: an earlier micro-batch of the window synchronised, and "
        "the last one did not. Move the synchronisation to the micro-batch right before the step (off by one)."
    ),
    "flag after forward": (
        "{n} of {updates} used gradients of the last micro-batch that were not synchronised, although "
        "synchronisation was on in its backward. DistributedDataParallel decides in its forward: set "
        "require_backward_grad_sync, or leave no_sync, before the forward."
    ),
    "bypassed": (
        "{n} of {updates} used gradients that were not synchronised, although synchronisation was on: "
        "DistributedDataParallel's own forward was bypassed, or ran under no_sync. Call the wrapper, not "
        "model.module(x), and leave no_sync before the forward."
    ),
    "held, sharded": (
        "{n} of {updates} left out gradients that were held back inside the sharded model. Call "
        "model.set_requires_gradient_sync(True) before the last micro-batch of a window, also where the data ends with "
        "a short one; that switches on HSDP's all-reduce, too."
    ),
}


class AuditReport:
    """The numbers of an audit, up to now while it runs. Print it for a table and advice."""

    def __init__(self, counts: Counts, settle: Callable[[], None]) -> None:
        self._counts = counts
        self._settle: Callable[[], None] | None = settle
        self._ended: float | None = None

    @property
    def backwards(self) -> int:
        """Backwards that reached the audited models, also those that gradsync runs to reduce what is held."""
        return self._now().backwards

    @property
    def syncs(self) -> int:
        """Synchronisations: one for each engine that a backward synchronised, however many buckets that took."""
        return self._now().syncs

    @property
    def updates(self) -> int:
        """Steps of the audited optimizers."""
        return self._now().updates

    @property
    def bytes(self) -> int:
        """Bytes of gradients that were synchronised.

        Under FSDP2 they are counted in the type in which it reduces them; under DDP in the gradients' own, before a
        communication hook or `compress` makes them smaller.
        """
        return self._now().bytes

    @property
    def wasted(self) -> int:
        """Synchronisations that were followed by another one before the optimizer stepped."""
        return self._now().wasted.total()

    @property
    def missed(self) -> int:
        """Optimizer steps on gradients that were not synchronised."""
        return self._now().missed.total()

    @property
    def discarded(self) -> int:
        """Synchronisations whose gradients were cleared without a step, for instance when a GradScaler skips it."""
        return self._now().discarded

    @property
    def seconds(self) -> float:
        """How long the audit has lasted."""
        return (time.perf_counter() if self._ended is None else self._ended) - self._counts.began

    @property
    def seconds_wasted(self) -> float | None:
        """An estimate of the time that the wasted synchronisations cost; None if it is not measurable.

        If the loop has synchronising and held backwards, it is the difference between their medians. Otherwise it is
        how long backwards waited for the reduction after their own work was done, which is less.
        """
        return self._estimate()[0]

    @property
    def advice(self) -> list[str]:
        """One sentence or two for each thing that is wrong; empty if nothing is."""
        counts = self._now()
        facts = {
            "syncs": _number(counts.syncs, "synchronisation"),
            "updates": _number(counts.updates, "optimizer step"),
            "ranks": counts.ranks,
        }
        found = [_WASTED[why].format(n=n, **facts) for why, n in counts.wasted.items()]
        return found + [_MISSED[why].format(n=n, **facts) for why, n in counts.missed.items()]

    def check(self) -> None:
        """Raise `GradSyncError` with the advice, if anything was wasted or missed."""
        if advice := self.advice:
            raise GradSyncError(" ".join(advice))

    def __str__(self) -> str:
        counts = self._now()
        seconds, at_least = self._estimate()
        if not counts.wasted:
            cost = ""
        elif seconds is None:
            cost = "cost not measurable"
        else:
            cost = f"{'at least' if at_least else 'about'} {seconds:.3g} s of {self.seconds:.3g} s (estimate)"
        rows = [
            ("backwards", counts.backwards, ""),
            ("syncs", counts.syncs, f"{_bytes(counts.bytes)} of gradients" if counts.syncs else ""),
            ("updates", counts.updates, ""),
            ("wasted", counts.wasted.total(), cost),
            ("missed", counts.missed.total(), ""),
        ]
        if counts.discarded:
            rows.append(("discarded", counts.discarded, "synchronised, then cleared without a step"))
        lines = [f"gradsync audit, rank {counts.rank} of {counts.ranks}"]
        lines += [f"  {name:<10}{value:>8}  {note}".rstrip() for name, value, note in rows]
        return "\n".join(lines + self.advice)

    def __repr__(self) -> str:
        counts = self._now()
        return (
            f"<AuditReport: {counts.backwards} backwards, {counts.syncs} syncs, {counts.updates} updates, "
            f"{counts.wasted.total()} wasted, {counts.missed.total()} missed>"
        )

    def _now(self) -> Counts:
        if self._settle is not None:
            self._settle()
        return self._counts

    def _close(self, now: float) -> None:
        self._settle, self._ended = None, now

    def _estimate(self) -> tuple[float | None, bool]:
        """Return the seconds wasted, and whether they are a lower bound."""
        total, at_least, measured = 0.0, False, 0
        for times in self._now().times.values():
            if times.num_wasted and times.synchronised:
                each, bound = _cost(times)
                total += times.num_wasted * each
                measured += times.num_wasted
                at_least |= bound
        return (total, at_least) if measured else (None, False)


def _cost(times: Times) -> tuple[float, bool]:
    """Return the seconds that a synchronisation adds to a backward, and whether they are a lower bound."""
    if times.held:
        with_sync = median(Clock.seconds(one.began, one.ended) for one in times.synchronised)
        without = median(Clock.seconds(one.began, one.ended) for one in times.held)
        return max(0.0, with_sync - without), False
    return median(Clock.seconds(one.computed, one.ended) for one in times.synchronised), True


def _number(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"
