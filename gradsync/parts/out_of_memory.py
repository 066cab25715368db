"""Recognises a lack of memory, and frees what a failed attempt leaves."""

from __future__ import annotations

import gc
import traceback

import torch

from gradsync._errors import GradSyncError

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
