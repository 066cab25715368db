"""Finds out when a backward begins and ends, from the gradient hooks that run in it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

# Private in torch 2.13, and what DDP and FSDP themselves use: the number of the graph that autograd is working on in
# this thread (-1 outside a backward), and a queue of what to call at that graph's end. The numbers grow.
current_task: Callable[[], int] = torch._C._current_graph_task_id
_queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback

Moment = Any  # a float of seconds, or a torch.Event


class Clock:
    """Moments of a device: the host's clock on the CPU, events on its current stream elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Moment:
        """Note this moment, without waiting for the device."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    @staticmethod
    def seconds(begin: Moment, end: Moment) -> float:
        """Return the time between two moments; waits for the device to have reached the second."""
        if isinstance(begin, float):
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Backward:
    """The backward that is running, and when the last one ran.

    A hook calls `enter(parameter)` whenever `task` is not autograd's current graph; if a new backward has begun,
    `opened` is called. A reentrant checkpoint runs a graph for each segment, inside the backward that it belongs to:
    all of these are one backward.
    """

    def __init__(self, clock: Clock, opened: Callable[[Any], None], reached: Collection[Any]) -> None:
        self._clock, self._opened = clock, opened
        self._reached = reached
        # The graph that hooks are known to run in, the graph whose end is the backward's end, and the newest graph.
        self.task: int = -2
        self._outer: int | None = None
        self._newest = -1
        self.began: Moment = None
        self.computed: Moment = None  # autograd's part is done; what follows is the wait for the reduction
        self.ended: Moment = None

    def enter(self, parameter: Any) -> None:
        task = current_task()
        nested = _in_function_backward()
        if self._outer is not None and (nested or task == self._outer):
            self.task, self._newest = task, max(task, self._newest)
            return
        # A segment's graph has ended. It is the same backward if
        # (a) the number went down: the outer graph goes on;
        # (b) it is the next number, inside a function's backward: the next segment;
        # (c) it is higher there, and this parameter is new: segments without parameters came between.
        same = task < self._newest or (nested and (task == self._newest + 1 or self._is_new(parameter)))
        if not same:
            self._opened(parameter)
            self.began = self._clock.now()
        self.computed = self.ended = None
        self.task = self._outer = task
        self._newest = max(task, self._newest)
        _queue_callback(self._on_computed)

    def leave(self) -> None:
        """Forget a backward that an exception has ended, unless a backward is running."""
        if current_task() == -1:
            self.task, self._outer = -2, None

    def _is_new(self, parameter: Any) -> bool:
        return bool(self._reached) and all(parameter is not one for one in self._reached)

    def _on_computed(self) -> None:
        self.computed = self._clock.now()
        # Queued while callbacks run, it runs after the callback in which the engine ends its reduction.
        _queue_callback(self._on_ended)

    def _on_ended(self) -> None:
        self.ended = self._clock.now()
        self.task, self._outer = -2, None


def _in_function_backward() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
