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
from gradsync.ranks.tables import Sent, copied_to_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_BUCKET = 250 * 1024 * 1024  # bytes, as in DDP
_HEAD = 16  # bytes for the flag; numbers of any dtype are aligned behind them

_Layout: TypeAlias = "tuple[torch.device, torch.dtype, torch.Size]"


class SharedBuffers:
    """The buffers of `roots`, to which it refers weakly. `device` is where the flag is sent."""

    def __init__(self, group: dist.ProcessGroup, roots: Iterable[nn.Module], device: torch.device) -> None:
        self._group, self._device = group, device
        self._roots = [weakref.ref(root) for root in roots]
        self._then: Mapping[str, _Layout] = {}  # what they were here when the ranks agreed
        self._common: Sequence[str] = ()  # those that were alike on all ranks then
        self._chunks: dict[torch.device, list[_Chunk]] = {}  # the same, in the order in which they are sent
        self._may_change = False  # whether a forward may replace them, on any rank
        self._agrees_next = True  # whether they agree anew before they send the next time
        self._flag: Sent | None = None  # on a device: whether the last sender had what was agreed on

    def share(self, source: int) -> None:
        """Give all ranks those of the group's rank `source`."""
        buffers = self._agreed()
        if self._may_change:
            self._send(source, buffers)()
            return
        common = [*buffers.values()]
        # If they are more or fewer, a layer of torch's came or went, on all ranks, or a forward has made others.
        if len(common) != len(self._common):
            owned = {id(one) for ref in self._roots for one in _of_torch(ref())}
            common = [buffer for buffer in common if id(buffer) in owned]
        if common:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(common)):
                dist._broadcast_coalesced(self._group, common, _BUCKET, source)

    def send(self, source: int) -> Callable[[], None]:
        """The same in two steps: one collective for each device, and a wait for nothing that was sent later.

        Call what is returned to wait. If shapes have changed on the `source`, all ranks have its buffers at once on a
        CPU. On another device they have them from the next time on, because the host would have to wait for the flag.
        """
        buffers = self._agreed()
        return self._send(source, buffers) if self._may_change or self._common else nothing

    def _send(self, source: int, buffers: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        layouts = {name: _layout(buffer) for name, buffer in buffers.items()}
        fits = {name: buffer for name, buffer in buffers.items() if layouts[name] == self._then.get(name)}
        is_full = source == self._group.rank() and layouts == self._then
        sent: list[tuple[Sequence[_Chunk], torch.Tensor, Any]] = []
        for device, chunks in self._chunks.items():
            if is_full:
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
                self._flag = copied_to_host(flag.reshape(1, 1), self._group)
            elif not flag:
                now = self._now()
                self._agree(now)
                self._send(source, now)()
                return
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(fits.values())):
                for chunks, flat, _ in sent:
                    head, *parts = flat.split([_HEAD, *(one.size for one in chunks)])
                    for one, part in zip(chunks, parts, strict=True):
                        one.put(part, fits, None if self._device.type == "cpu" else head[0].bool())

        return arrive

    def _agreed(self) -> dict[str, torch.Tensor]:
        """The buffers, after the ranks have agreed anew if that is due."""
        buffers = self._now()
        if self._agrees_next or (self._flag is not None and not self._flag.rows()[0][0]):
            self._agree(buffers)
        return buffers

    def _now(self) -> dict[str, torch.Tensor]:
        """The buffers, by names that are the same on all ranks. Those of inference mode cannot be written to later."""
        return {
            f"{place}.{name}": buffer
            for place, ref in enumerate(self._roots)
            if (root := ref()) is not None
            for name, buffer in shared_buffers(root)
            if not buffer.is_inference()
        }

    def _agree(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Compare the layouts of the buffers with those on the other ranks. Collective.

        They will be compared the next time, too, if they differ, or have changed since the ranks agreed last.
        """
        then, now = self._then, {name: _layout(buffer) for name, buffer in buffers.items()}
        words = {name: f"{dtype} {list(shape)} {device.type}" for name, (device, dtype, shape) in now.items()}
        roots = [root for ref in self._roots if (root := ref()) is not None]
        saying = {
            "buffers": words,
            "have changed": bool(then) and now != then,
            "may change": any(map(_may_change, roots)),
        }
        # By their classes, and not by what they have: all ranks must come to the same answer.
        meets = not all(_is_of_torch(module) for root in roots for module in root.modules())
        topic = "a boundary where the shapes of buffers are compared"
        said = meet(self._group, topic, saying) if meets else [saying]
        self._may_change = self._may_change or any(one["may change"] for one in said)
        self._common = sorted(
            name for name, mine in words.items() if all(one["buffers"].get(name) == mine for one in said)
        )
        by_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name in sorted(self._common, key=lambda name: -now[name][1].itemsize):  # so that all numbers are aligned
            by_kind.setdefault(now[name][:2], []).append(name)
        self._then, self._chunks = now, {self._device: []}
        for (device, dtype), names in by_kind.items():
            shapes = [torch.empty(now[name][2], dtype=dtype, device="meta") for name in names]
            self._chunks.setdefault(device, []).append(_Chunk(dtype, names, shapes))
        self._agrees_next = any(one["have changed"] or one["buffers"] != said[0]["buffers"] for one in said)
        self._flag = None


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
        return _flatten_dense_tensors([buffers[name].detach().resolve_conj() for name in self.names]).view(torch.uint8)

    def put(self, part: torch.Tensor, buffers: Mapping[str, torch.Tensor], flag: torch.Tensor | None) -> None:
        """Copy what came into those of `buffers`, if the flag is set; None: the host knows that it is."""
        values = _unflatten_dense_tensors(part.view(self.dtype), self.shapes)
        pairs = [(buffers[name], value) for name, value in zip(self.names, values, strict=True) if name in buffers]
        if flag is not None:
            pairs = [(buffer, torch.where(flag, value, buffer)) for buffer, value in pairs]
        for buffer, value in pairs:
            if buffer.is_conj():  # a view, which the copy of all at once does not take
                buffer.copy_(value)
        pairs = [(buffer, value) for buffer, value in pairs if not buffer.is_conj()]
        if pairs:
            torch._foreach_copy_([buffer for buffer, _ in pairs], [value for _, value in pairs])


def shared_buffers(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers of a module that the ranks may have in common, by name."""
    ignored = getattr(root, "_ddp_params_and_buffers_to_ignore", ())
    return [(name, buffer) for name, buffer in root.named_buffers() if name not in ignored]


_OF_NORMS = {"running_mean", "running_var", "num_batches_tracked"}  # also of a BatchNorm with an activation (timm)


def _may_change(root: nn.Module) -> bool:
    """Whether a module that is not torch's own has buffers that are shared, or may get them."""
    ignored = getattr(root, "_ddp_params_and_buffers_to_ignore", ())
    return any(
        f"{path}.{name}".removeprefix(".") not in ignored
        for path, module in root.named_modules()
        if not _is_of_torch(module)
        for name in module._buffers.keys() - (_OF_NORMS if isinstance(module, nn.modules.batchnorm._NormBase) else ())
    )


def _of_torch(root: nn.Module | None) -> list[object]:
    """The buffers of torch's own layers."""
    modules = () if root is None else root.modules()
    return [one for module in modules if _is_of_torch(module) for one in module._buffers.values()]


def _is_of_torch(module: nn.Module) -> bool:
    """Whether its forward is one of torch's own layers, which keep the shapes of their buffers."""
    return type(module).__module__.startswith("torch.nn.")


def _layout(buffer: torch.Tensor) -> _Layout:
    return buffer.device, buffer.dtype, buffer.shape


def nothing() -> None:
    """Wait for nothing."""
