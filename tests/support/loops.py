"""The fronts in one shape: a loop over a rank's data, with a loss of each item; those that replay give how often."""

from __future__ import annotations

import gradsync
from gradsync import LossSum, accumulating
from tests.support.items import unsized


def over(steps, home, optimizer, loss_of, data, **options) -> int:
    """Models and optimizers are known by keyword; an item that is None is passed over."""
    step = accumulating(steps=steps, model=home, optimizer=optimizer, **options)(loss_of)
    for x in step.over(data):
        if x is not None:
            step(x)
    return step.progress.replays


def over_unsized(steps, home, optimizer, loss_of, data) -> int:
    return over(steps, home, optimizer, loss_of, unsized(data))


def over_unnamed(steps, home, optimizer, loss_of, data) -> int:
    """Models and optimizers come with the calls."""
    step = accumulating(steps=steps)(lambda home, optimizer, x: loss_of(x))
    for x in step.over(data):
        if x is not None:
            step(home, optimizer, x)
    return step.progress.replays


def sync_every(steps, home, optimizer, loss_of, data) -> int:
    """An item that is None has no backward, and no update."""
    replays = 0
    for micro, x in gradsync.sync_every(home, steps, data):
        if x is None:
            continue
        loss = loss_of(x)
        micro.backward(loss.loss, count=loss.count) if isinstance(loss, LossSum) else micro.backward(loss)
        replays += micro.replay
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()
    return replays


def calls(steps, home, optimizer, loss_of, data, **options) -> None:
    """A plain loop, with equally many items on all ranks."""
    step = accumulating(steps=steps, model=home, optimizer=optimizer, **options)(loss_of)
    for x in data:
        step(x)
    step.flush()


def plain(steps, home, optimizer, loss_of, data) -> None:
    """`sync_every` with the user's own backward, which divides as by hand."""
    for micro, x in gradsync.sync_every(home, steps, data):
        (loss_of(x) / micro.size).backward()
        if micro.last:
            optimizer.step()
            optimizer.zero_grad()


def by_sync_gradients(steps, home, optimizer, loss_of, data) -> None:
    for start in range(0, len(data), steps):
        with gradsync.no_sync(home):
            for x in data[start : start + steps]:
                (loss_of(x) / steps).backward()
        gradsync.sync_gradients(home)
        optimizer.step()
        optimizer.zero_grad()
