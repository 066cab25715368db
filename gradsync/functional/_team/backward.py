"""The backward of a micro-batch, and in which order the engines of a window synchronise, in it and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd import graph

from gradsync._errors import GradSyncError
from gradsync.engines import Engine
from gradsync.ranks.lost import is_lost


class Order(NamedTuple):
    """In which order engines synchronise: the same on every rank, whatever parameters its backward reaches."""

    armed: Sequence[Engine] = ()  # in the backward, or right after it if it does not reach them
    after: Sequence[Engine] = ()  # after those, one after another
    again: Sequence[Engine] = ()  # all engines, once more
    between: Callable[[], object] = bool  # called right before `again`
    asked: Sequence[Engine] = ()  # those to be asked what is wrong with the parameters that this rank has used

    @classmethod
    def of_boundary(cls, engines: Sequence[Engine], size: int, asked: Sequence[Engine]) -> Order:
        """The order at the boundary of a window that is planned for `size` micro-batches.

        An engine with a static graph must synchronise in the backward of its very first micro-batch. In a window of
        more than one micro-batch, it synchronises a second time, at the boundary: also on a rank that has only one
        micro-batch, because others may have more.

        Of several engines, the first synchronises in the backward, and the others after it, one after another. The
        backward reaches engines in an order that other ranks do not know: their micro-batches may use other models, or
        they have none. Engines whose forward communicates all synchronise in the backward, because every rank runs it.
        """
        if not engines:
            return HELD
        owing = [engine for engine in engines if engine.owes_first]
        if owing and (size > 1 or len(engines) > 1):
            return cls(owing, (), engines, asked=asked)
        together = [engine for engine in engines if engine.forward_communicates] or engines[:1]
        return cls(together, [engine for engine in engines if engine not in together], asked=asked)

    def without_backward(self) -> Order:
        """The same where this rank runs no backward, while other ranks may run theirs."""
        return HELD if self is HELD else Order(after=self.again or (*self.armed, *self.after), asked=self.asked)

    def of_replay(self) -> Order:
        """The same where this rank's backward is a replay."""
        late = [engine for engine in self.armed if not engine.arms_replays]
        return self._replace(armed=[one for one in self.armed if one not in late], after=[*late, *self.after])

    def arm(self, loss: torch.Tensor | None) -> None:
        """Before the backward of a loss: get ready to synchronise in it. None: it is the user's own, and runs."""
        for engine in self.armed:
            engine.arm(loss)

    def complete(self) -> None:
        """After the backward: synchronise what it has not. Without one, synchronise all."""
        # Asked before the collectives, which overwrite what is looked at; raised after them.
        wrong = [error for engine in self.asked if (error := engine.misuse()) is not None]
        for engine in (*self.armed, *self.after, *self.again):
            engine.drop_replayed()
        for engine in self.armed:
            engine.finish()
        for engine in self.after:
            engine.reduce()
        if self.again:
            self.between()
        for engine in self.again:
            engine.reduce()
        if wrong:
            raise wrong[0]

    def abort(self) -> None:
        """Complete the collectives of a backward that failed. Errors in here are dropped: the first error goes on."""
        todo: list[Callable[[], object]] = [engine.abort for engine in self.armed]
        todo += [engine.reduce for engine in self.after]
        todo += [self.between, *(engine.reduce for engine in self.again)]
        for complete in todo:
            try:
                complete()
            except Exception as second:  # noqa: BLE001, PERF203 - the first error goes on
                if is_lost(second):
                    return  # each further wait could last for the group's time-out


HELD = Order()  # no engine synchronises


RunBackward: TypeAlias = Callable[[torch.Tensor], object]
"""Runs a backward in place of `loss.backward()`: `accelerator.backward`, `fabric.backward`."""


def backward(
    loss: torch.Tensor, order: Order, seed: torch.Tensor | None = None, run: RunBackward | None = None
) -> None:
    """Run the backward of `loss` inside a `Hold`; the armed engines of `order` synchronise in it. `complete` follows.

    `seed` is the gradient to begin with, 1 by default; `run` runs the backward, `loss.backward` by default.
    """
    if order.armed:
        order.arm(loss)
    if run is not None:
        _insist(run, loss if seed is None else loss * seed)
    elif seed is None or _RUN is None or type(loss) is not torch.Tensor:
        loss.backward(seed)
    else:
        _RUN((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


# What `loss.backward(seed)` calls, without its checks of the seed, which is ours; they cost a fifth of the call. It is
# private in torch; without it, and for a subclass of tensors, `backward` is called.
_RUN: Callable[..., Any] | None = getattr(graph, "_engine_run_backward", None)


def _insist(run: RunBackward, loss: torch.Tensor) -> None:
    """Let `run` run the backward; raise if it did not."""
    who = getattr(run, "__self__", None)
    steps = getattr(who, "gradient_accumulation_steps", 1)
    if steps != 1:
        raise GradSyncError(
            f"What is given as run= must run the backward of the loss as it is, but this {type(who).__name__} divides "
            f"it by its gradient_accumulation_steps, which are {steps}, and gradsync divides already. Make it with "
            "gradient_accumulation_steps=1."
        )
    came: list[None] = []
    watch = loss.register_hook(lambda _: came.append(None))
    try:
        run(loss)
    finally:
        watch.remove()
    if not came:
        raise GradSyncError(
            f"What is given as run= must run the backward of the loss that it is called with, but {run!r} returned and "
            "no backward had come to that loss. Pass accelerator.backward or fabric.backward, or leave run= out."
        )
