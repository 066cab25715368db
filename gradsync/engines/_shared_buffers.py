"""The buffers that all ranks have in common: sent now, and put in place later, whatever is sent in between.

A forward may replace a buffer by one of another shape, and not on all ranks: a rotary table that grows with the longest
sequence so far. To send it would scramble it, or gloo would end the process. So what is sent has the shapes that the
ranks have agreed on, with a flag: whether the rank that sends it still has these. If it does not, the ranks agree anew,
on the buffers that are alike everywhere. The others stay each rank's own.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from gradsync.ranks.meet import meet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_HEAD = 16  # bytes for the flag; numbers of any dtype are aligned behind them

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
        self._then: Mapping[str, _Layout] = {}  # what they were here when the ranks agreed
        self._chunks: dict[torch.device, list[_Chunk]] = {}  # those that were alike everywhere, in the order of sending
        #: Whether the ranks need not agree anew before they send, as the last flag has told. At first they must.
        self._holds_still: Callable[[], bool] = bool

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
        goes_on = not self._holds_still() and self._agree(buffers)
        layouts = {name: _layout(buffer) for name, buffer in buffers.items()}
        fits = {name: buffer for name, buffer in buffers.items() if layouts[name] == self._then.get(name)}
        sent: list[tuple[Sequence[_Chunk], torch.Tensor, Any]] = []
        for device, chunks in self._chunks.items():
            if source == self._group.rank() and layouts == self._then:
                head = torch.ones(_HEAD, dtype=torch.uint8, device=device)
                flat = torch.cat([head, *(one.bytes_of(buffers) for one in chunks)])
            else:
                flat = torch.zeros(_HEAD + sum(one.size for one in chunks), dtype=torch.uint8, device=device)
            work = dist.broadcast(flat, dist.get_global_rank(self._group, source), group=self._group, async_op=True)
            sent.append((chunks, flat, work))

        def arrive() -> None:
            for _, _, work in sent:
                work.wait()
            flag = sent[0][1][0]
            if self._device.type != "cpu":
                self._holds_still = bool if goes_on else _read_later(flag)
            elif flag:
                self._holds_still = _always
            else:
                self._agree(self.now())
                self._holds_still = _always
                self.send(source)()
                return
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(fits.values())):
                for chunks, flat, _ in sent:
                    head, *parts = flat.split([_HEAD, *(one.size for one in chunks)])
                    for one, part in zip(chunks, parts, strict=True):
                        one.put(part, fits, None if self._device.type == "cpu" else head[0].bool())

        return arrive

    def _agree(self, buffers: Mapping[str, torch.Tensor]) -> bool:
        """Compare the layouts of the buffers with those on the other ranks. Collective.

        Returns whether they have changed, on any rank, since the ranks agreed last.
        """
        then, now = self._then, {name: _layout(buffer) for name, buffer in buffers.items()}
        words = {name: f"{dtype} {list(shape)} {device.type}" for name, (device, dtype, shape) in now.items()}
        saying = {"buffers": words, "changed": bool(then) and now != then}
        said = meet(self._group, "a boundary where the shapes of buffers are compared", saying)
        common = sorted(name for name, mine in words.items() if all(one["buffers"].get(name) == mine for one in said))
        by_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name in sorted(common, key=lambda name: -now[name][1].itemsize):  # so that all numbers are aligned
            by_kind.setdefault(now[name][:2], []).append(name)
        self._then, self._chunks = now, {self._device: []}
        for (device, dtype), names in by_kind.items():
            shapes = [torch.empty(now[name][2], dtype=dtype, device="meta") for name in names]
            self._chunks.setdefault(device, []).append(_Chunk(dtype, names, shapes))
        return any(one["changed"] for one in said)


class _Chunk(NamedTuple):
    """Some buffers of one dtype, next to each other in what is sent."""

    dtype: torch.dtype
    names: Sequence[str]
    shapes: Sequence[torch.Tensor]  # tensors of these shapes, without data

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(shape.nbytes for shape in self.shapes)

    def bytes_of(self, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """These buffers, one after the other."""
        return _flatten_dense_tensors([buffers[name].detach() for name in self.names]).view(torch.uint8)

    def put(self, part: torch.Tensor, buffers: Mapping[str, torch.Tensor], flag: torch.Tensor | None) -> None:
        """Copy what came into those of `buffers`, if the flag is set; None: the host knows that it is."""
        values = _unflatten_dense_tensors(part.view(self.dtype), self.shapes)
        pairs = [(buffers[name], value) for name, value in zip(self.names, values, strict=True) if name in buffers]
        if flag is not None:
            pairs = [(buffer, torch.where(flag, value, buffer)) for buffer, value in pairs]
        if pairs:
            torch._foreach_copy_([buffer for buffer, _ in pairs], [value for _, value in pairs])


def shared_buffers(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that all ranks have in common, by name."""
    ignored = getattr(root, "_ddp_params_and_buffers_to_ignore", ())
    return [(name, buffer) for name, buffer in root.named_buffers() if name not in ignored]


_OF_NORMS = {"running_mean", "running_var", "num_batches_tracked"}  # also of a BatchNorm with an activation (timm)


def _may_change(root: nn.Module) -> bool:
    """Whether a module that is not torch's own has buffers that are shared, or may get them."""
    ignored = getattr(root, "_ddp_params_and_buffers_to_ignore", ())
    return any(
        f"{path}.{name}".removeprefix(".") not in ignored
        for path, module in root.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
        for name in module._buffers.keys() - (_OF_NORMS if isinstance(module, nn.modules.batchnorm._NormBase) else ())
    )


def _layout(buffer: torch.Tensor) -> _Layout:
    return buffer.device, buffer.dtype, buffer.shape


def _always() -> bool:
    return True


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
