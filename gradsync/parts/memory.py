"""Recognises a lack of memory, frees what a failed attempt leaves, and undoes what it changed beside gradients."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import TYPE_CHECKING

import torch

from gradsync._errors import GradSyncError
from gradsync.parts.handed import Handed, version_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, TypeAlias

    from torch import nn

    Seen: TypeAlias = Sequence[tuple[torch.Tensor | None, int]]  # buffers and their versions

# The messages of plain RuntimeErrors: of the CPU's allocator, C++'s own, MPS's, and vendors' libraries. oneDNN does not
# say what it lacked. If it reports a mistake in the same words, a single row fails, too, and the error is raised.
_MESSAGES = (
    "can't allocate memory",
    "std::bad_alloc",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "could not create a primitive",
    "could not create a memory",
    "could not execute a primitive",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    True
    """
    if isinstance(error, GradSyncError):
        return False  # whatever its message says
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def let_go(error: BaseException, before: BaseException | None) -> None:
    """Clear the variables of the calls that `error` ended: they hold the activations of a failed forward.

    `before` is the exception that was being handled when those calls began; its calls keep their variables.
    """
    chained: BaseException | None = error
    while chained is not None and chained is not before:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__context__


def free() -> None:
    """Free what nobody refers to: reference cycles, and the blocks that an accelerator's allocator keeps."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # gradients arrive on streams of their own
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


class Before:
    """The arguments, the random state and the buffers as they were before an attempt."""

    __slots__ = ("_buffers", "_copies", "_cpu", "_devices", "_handed", "_seen")

    def __init__(
        self,
        buffers: Buffers,
        devices: Sequence[torch.device],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._handed = Handed(args, kwargs or {})
        self._cpu = torch.default_generator.get_state()
        self._devices = (
            [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices] if devices else ()
        )
        self._buffers = buffers
        self._seen: Seen = ()
        self._copies: dict[int, torch.Tensor] = {}
        if buffers:
            self._seen, self._copies = buffers.see()

    def keep(self) -> None:
        """The attempt succeeded: what it changed stays."""
        if self._seen:
            self._buffers.learn(self._seen)

    def put_back(self) -> None:
        """The attempt failed: undo what it changed."""
        torch.default_generator.set_state(self._cpu)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, device)
        if self._seen:
            self._buffers.put_back(self._seen, self._copies)
        self._handed.put_back()


class Buffers:
    """The buffers of some models, which it does not keep alive.

    Forwards change few buffers, such as a counter or the vector of a spectral norm, and the first attempt shows which.
    Before that attempt all buffers are copied, later only those. The others are watched by object and version.
    """

    def __init__(self, models: Iterable[nn.Module] = ()) -> None:
        modules = {id(module): module for model in models for module in model.modules()}
        self._places = [
            (weakref.ref(module), name)
            for module in modules.values()
            for name in module._buffers  # also those that are None, which a first forward may replace
        ]
        self._moving: set[int] | None = None  # indices in places; None until an attempt has shown them

    def __bool__(self) -> bool:
        return bool(self._places)

    def like(self, other: Buffers) -> Buffers:
        """`other`, with what it has learnt, if it has the same buffers; else `self`."""
        return other if self._places == other._places else self

    def see(self) -> tuple[Seen, dict[int, torch.Tensor]]:
        """The buffers as they are now, and copies of those that an attempt may change."""
        seen = [(one, version_of(one)) for one in map(self._at, range(len(self._places)))]
        moving = range(len(seen)) if self._moving is None else self._moving
        return seen, {index: one.clone() for index in moving if (one := seen[index][0]) is not None}

    def learn(self, seen: Seen) -> None:
        """An attempt has succeeded: remember which buffers it changed."""
        self._moving = (self._moving or set()) | set(self._changed(seen))

    def put_back(self, seen: Seen, copies: dict[int, torch.Tensor]) -> None:
        """An attempt has failed: undo what it changed."""
        for index in self._changed(seen):
            ref, name = self._places[index]
            module = ref()
            if module is None:
                continue
            before, version = seen[index]
            module._buffers[name] = before  # another object may have been put in its place
            if version_of(before) == version:
                continue
            if before is None or index not in copies:
                raise GradSyncError(
                    f"A call that ran out of memory can go on in parts only if what it changed is put back, but it "
                    f"changed the buffer {name!r} of a {type(module).__name__}, which no call had changed before and "
                    "of which there is therefore no copy. Change it in the first call, or outside the forward."
                )
            with torch.no_grad():
                before.copy_(copies[index])

    def _changed(self, seen: Seen) -> list[int]:
        return [
            index
            for index, (before, version) in enumerate(seen)
            if self._at(index) is not before or version_of(before) != version
        ]

    def _at(self, index: int) -> torch.Tensor | None:
        ref, name = self._places[index]
        module = ref()
        return None if module is None else module._buffers.get(name)
