"""The buffers that all ranks have in common: sent now, and put in place later, whatever is sent in between.

A forward may replace a buffer by one of another shape, and not on all ranks: a rotary table that grows with the longest
sequence so far. To send it would scramble it, or gloo would end the process. So what is sent has the shapes that the
ranks have agreed on, with a flag: whether the rank that sends it still has these. If it does not, the ranks agree anew,
on the buffers that are alike everywhere. The others stay each rank's own.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from gradsync.ranks.meet import meet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

_Layout: TypeAlias = "tuple[torch.device, torch.dtype, torch.Size]"


class SharedBuffers:
    """The buffers that `roots` have now, by name: a forward may make others, on some ranks only.

    It refers to the roots weakly. `device` is where the flag is sent.
    """

    def __init__(self, group: dist.ProcessGroup, roots: Iterable[nn.Module], device: torch.device) -> None:
        self._group, self._device = group, device
        roots = list(roots)
        self._roots = [(weakref.ref(root), {name for name, _ in shared_buffers(root)}) for root in roots]
        #: Whether a forward may replace them. Those of torch's own layers keep their shapes.
        self.may_change = any(map(_may_change, roots))
        self._then: Mapping[str, _Layout] | None = None  # what they were here when the ranks agreed
        self._common: Sequence[str] = ()  # those that were alike on all ranks then
        self._was_as_then: Callable[[], bool] | None = None  # the last flag of a device, where it is read later

    def __bool__(self) -> bool:
        return self.may_change or bool(self.now())

    def now(self) -> dict[str, torch.Tensor]:
        """The buffers, by names that are the same on all ranks. Those of inference mode cannot be written to later."""
        return {
            f"{place}.{name}": buffer
            for place, (ref, names) in enumerate(self._roots)
            if (root := ref()) is not None
            for name, buffer in root.named_buffers()
            if name in names and not buffer.is_inference()
        }

    def send(self, source: int) -> Callable[[], None]:
        """Send those of the group's rank `source`: one collective for each device.

        Call what is returned to wait for them, and for nothing that was sent later. All ranks then have them. If their
        shapes have changed on the `source`, that is so at once on a CPU. On another device it is so from the next time
        on, because the host would have to wait for the flag.
        """
        buffers = self.now()
        if self._then is None or (self._was_as_then is not None and not self._was_as_then()):
            self._agree(buffers)
        assert self._then is not None, "agreed on"
        self._was_as_then = None
        layouts = {name: _layout(buffer) for name, buffer in buffers.items()}
        fits = [name for name in self._common if layouts.get(name) == self._then[name]]
        by_device: dict[torch.device, list[str]] = {self._device: []}
        for name in self._common:
            by_device.setdefault(self._then[name][0], []).append(name)
        sent: list[tuple[list[str], torch.Tensor, Any]] = []
        for device, names in by_device.items():
            if source == self._group.rank() and layouts == self._then:
                flag = torch.ones(1, dtype=torch.uint8, device=device)
                flat = torch.cat([flag, *(_bytes(buffers[name].detach()) for name in names)])
            else:
                flat = torch.zeros(1 + sum(map(self._size, names)), dtype=torch.uint8, device=device)
            work = dist.broadcast(flat, dist.get_global_rank(self._group, source), group=self._group, async_op=True)
            sent.append((names, flat, work))

        def arrive() -> None:
            for _, _, work in sent:
                work.wait()
            is_as_then = sent[0][1][0]
            if self._device.type != "cpu":
                self._was_as_then = _read_later(is_as_then)
            elif not is_as_then:
                self._agree(self.now())
                self.send(source)()
                return
            for names, flat, _ in sent:
                self._put({name: buffers[name] for name in fits}, names, flat)

        return arrive

    def _put(self, buffers: Mapping[str, torch.Tensor], names: Sequence[str], flat: torch.Tensor) -> None:
        """Write what came for `names` into those of `buffers`, if the flag says that it is there."""
        flag, *parts = flat.split([1, *map(self._size, names)])
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers.values())):
            for name, part in zip(names, parts, strict=True):
                if name in buffers:
                    buffer = buffers[name]
                    # Cloned, because the bytes may not be aligned for this dtype.
                    value = part.clone().view(buffer.dtype).view(buffer.shape)
                    is_slow = flag.device.type != "cpu"  # else the flag has been read, and is set
                    buffer.copy_(torch.where(flag.bool(), value, buffer) if is_slow else value)

    def _agree(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Compare the layouts of the buffers with those on the other ranks. Collective."""
        self._then = {name: _layout(buffer) for name, buffer in buffers.items()}
        words = {name: f"{dtype} {list(shape)} {device.type}" for name, (device, dtype, shape) in self._then.items()}
        said = meet(self._group, "a boundary where the shapes of buffers are compared", words)
        self._common = sorted(name for name, mine in words.items() if all(one.get(name) == mine for one in said))

    def _size(self, name: str) -> int:
        assert self._then is not None, "agreed on"
        _, dtype, shape = self._then[name]
        return shape.numel() * dtype.itemsize


def shared_buffers(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that all ranks have in common, by name."""
    ignored = getattr(root, "_ddp_params_and_buffers_to_ignore", ())
    return [(name, buffer) for name, buffer in root.named_buffers() if name not in ignored]


def _may_change(root: nn.Module) -> bool:
    """Whether a module that is not torch's own has buffers that are shared, or may get them."""
    ignored = getattr(root, "_ddp_params_and_buffers_to_ignore", ())
    return any(
        f"{path}.{name}".removeprefix(".") not in ignored
        for path, module in root.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
        for name in module._buffers
    )


def _layout(buffer: torch.Tensor) -> _Layout:
    return buffer.device, buffer.dtype, buffer.shape


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.contiguous().view(-1).view(torch.uint8)


def _read_later(flag: torch.Tensor) -> Callable[[], bool]:
    """Copy a flag from its device without waiting; returns what waits for it, and tells it."""
    host = torch.empty((), dtype=flag.dtype, device="cpu", pin_memory=True)
    host.copy_(flag, non_blocking=True)
    event = torch.accelerator.current_stream(flag.device).record_event()

    def read() -> bool:
        if not event.query():
            event.synchronize()
        return bool(host)

    return read
