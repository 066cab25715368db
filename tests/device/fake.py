"""Importing this gives torch a device named "cuda". It must be imported before torch; see `source/device.cpp`.

What the library cannot do from C++ is done here: `torch.cuda` is told that it is initialised and has one device, and
the backend "likenccl" is made the default of that device.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import sys

from tests.device.build import NAME, library
from tests.device.waits import note

assert "torch" not in sys.modules, "torch looks for its devices once: import tests.device.fake before it"
_LIBRARY = str(library())
ctypes.CDLL(_LIBRARY, ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

_loader = importlib.machinery.ExtensionFileLoader(NAME, _LIBRARY)
device = importlib.util.module_from_spec(importlib.util.spec_from_loader(NAME, _loader))
_loader.exec_module(device)
assert device.is_there(), "the library came too late"


def races() -> list[str]:
    """Uses of the same memory by streams that are in no order, since the last call: each a sentence."""
    return device.take_races()


def catch_up() -> None:
    """The device has done all that was queued so far: to wait for an event of before is no wait any more."""
    device.catch_up()


def hang() -> None:
    """The device gets no further, as one does whose collective waits for a lost rank."""
    device.hang()


class _Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **_):
        return super().__new__(cls, device="cuda:0", priority=priority)


class _Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, device="cuda:0", enable_timing=enable_timing)


def _always(value):
    return lambda *_, **__: value


def _install() -> None:
    cuda = torch.cuda
    for name in ("is_available", "is_initialized", "is_bf16_supported"):
        setattr(cuda, name, _always(True))
    for name in ("_lazy_init", "init", "set_device", "empty_cache", "_lazy_call", "manual_seed", "manual_seed_all", "ipc_collect"):
        setattr(cuda, name, _always(None))
    cuda.device_count, cuda.current_device, cuda._is_in_bad_fork = _always(1), _always(0), _always(False)
    cuda._utils._get_device_index = _always(0)
    cuda.get_rng_state, cuda.set_rng_state = lambda *_: torch.get_rng_state(), _always(None)  # it draws the CPU's numbers
    cuda.get_device_capability, cuda.get_device_name = _always((9, 0)), _always("fake")
    cuda.default_generators = (torch.default_generator,)  # its kernels are the CPU's
    cuda.synchronize = torch.accelerator.synchronize
    cuda.Stream = cuda.streams.Stream = _Stream
    cuda.Event = cuda.streams.Event = _Event
    cuda.current_stream = cuda.default_stream = lambda *_: torch.accelerator.current_stream()
    cuda.set_stream = torch.accelerator.set_stream
    cuda.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    torch.Tensor.cuda = lambda self, *_, non_blocking=False, **__: self.to("cuda:0", non_blocking=non_blocking)
    torch.UntypedStorage.resize_ = _resize_with(torch.UntypedStorage.resize_)
    dist.Backend.register_backend("likenccl", _like_nccl, devices=["cuda"])
    dist.Backend.default_device_backend_map["cuda"] = "likenccl"
    device.on_wait(lambda operation: note(operation.removeprefix("aten::")))


def _resize_with(plain):
    """torch resizes a storage of CUDA's by a function that a build without CUDA does not have."""

    def resize_(self, size):
        if self.device.type != "cuda":
            return plain(self, size)
        with torch.no_grad():
            device.resize_storage(torch.empty(0, dtype=torch.uint8, device="cuda:0").set_(self, 0, (0,), (1,)), size)
        return self

    return resize_


def _like_nccl(store, rank, size, timeout):
    return device.like_nccl(dist.ProcessGroupGloo(store, rank, size, timeout))


_install()
