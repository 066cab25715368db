"""`Tables`: a small table that the ranks exchange. Each rank fills its own row, and an all-reduce adds the tables up.

The table is float64, so that whole numbers below 2**53 arrive exactly. On a device it is copied to the host on a stream
of its own: to wait for it is never to wait for a backward that was launched after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradsync.ranks.group import timeout_of

Row = list["float | torch.Tensor"]

_BEFORE_THE_WATCHDOG = 0.9  # of the group's time-out: after it, nccl's watchdog ends the process without a Python error


class Tables:
    """Exchanges tables between the ranks of one group."""

    __slots__ = ("_device", "_group", "_is_slow", "_stream", "num_ranks", "rank")

    def __init__(self, group: dist.ProcessGroup | None, parameters: Sequence[torch.Tensor]) -> None:
        self._group = None if group is None or group.size() == 1 else group
        self.num_ranks, self.rank = (1, 0) if self._group is None else (self._group.size(), self._group.rank())
        self._device = torch.device("cpu") if self._group is None else device_of(self._group, parameters)
        self._is_slow = self._device.type != "cpu"  # whether the host runs ahead of the device
        self._stream: Any = None

    def send(self, row: Row) -> Sent:
        """Send this rank's row, without waiting. Collective: every rank sends a row of the same length."""
        if self._group is None:
            return Sent(self._table(row))
        table = self._table(row)
        work: Any = dist.all_reduce(table, group=self._group, async_op=True)
        if not self._is_slow:
            return Sent(table, work.wait)
        if self._stream is None:
            self._stream = torch.Stream(self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            work.wait()
            sent = copied_to_host(table, self._group)
            table.record_stream(self._stream)
        return sent

    def _table(self, row: Row) -> torch.Tensor:
        """A table of zeros with this rank's row."""
        size = self.num_ranks, len(row)
        table = torch.zeros(size, dtype=torch.float64, device="cpu", pin_memory=self._is_slow)
        mine = [0.0 if isinstance(number, torch.Tensor) else number for number in row]
        table[self.rank] = torch.tensor(mine, dtype=torch.float64, device="cpu")
        if self._is_slow:
            table = table.to(self._device, non_blocking=True)
        for place, number in enumerate(row):
            if isinstance(number, torch.Tensor):
                table[self.rank, place] = number.reshape(())
        return table


class Sent:
    """A table that was sent."""

    __slots__ = ("_rows", "_table", "_wait")

    def __init__(self, table: torch.Tensor, wait: Callable[[], object] = bool) -> None:
        """The table is complete after `wait()`."""
        self._table = table
        self._wait = wait
        self._rows: list[list[float]] | None = None

    def rows(self) -> list[list[float]]:
        """Wait for the table; returns the rows in the order of ranks."""
        if self._rows is None:
            self._wait()
            self._rows = self._table.tolist()
        return self._rows


def copied_to_host(table: torch.Tensor, group: dist.ProcessGroup) -> Sent:
    """Copy a table, which other ranks of `group` have sent, from its device, without waiting for that."""
    host = torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=True)
    host.copy_(table, non_blocking=True)
    event = torch.accelerator.current_stream(table.device).record_event()
    return Sent(host, partial(_wait_for, event, time.monotonic(), _BEFORE_THE_WATCHDOG * timeout_of(group)))


def _wait_for(event: Any, start: float, limit: float) -> None:
    """Wait for what a device still has to bring; raise, as for a lost rank, `limit` seconds after `start`.

    To wait for an event itself has no time-out.
    """
    began = time.monotonic()
    while not event.query():
        now = time.monotonic()
        if now - start > limit:
            raise dist.DistError(f"after {now - start:.0f} s the device had not brought the other ranks' table")
        time.sleep(min(max((now - began) / 16, 2e-5), 0.01))
    event.synchronize()


def device_of(group: dist.ProcessGroup, parameters: Sequence[torch.Tensor]) -> torch.device:
    """The device for tensors in a collective of `group`: that of the parameters, or else the group's own.

    A group of NCCL alone takes no CPU tensors, and offloaded parameters are on the CPU.
    """
    types = [torch.device(kind).type for kind in group._device_types]
    for parameter in parameters:
        if parameter.device.type in types:
            return parameter.device
    if types[0] == "cpu":
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())
