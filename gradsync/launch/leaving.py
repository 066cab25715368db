"""Ends a rank's process groups: cleanly, or after an exception without waiting for ranks that will not answer.

`destroy_process_group` on nccl may wait for kernels that the device has not finished. After an exception on one rank,
these kernels wait for the other ranks, which wait for this rank: the process would hang before Python prints the error.
So the traceback is printed at once, and the group is aborted, which waits for nothing (torch 2.13:
`distributed_c10d._abort_process_group`). gloo has nothing pending on a device: its group is destroyed as usual.
"""

from __future__ import annotations

import sys
import traceback
import warnings

import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradsync._state import LATE
from gradsync.engines import settle_all_groups
from gradsync.overlap import LEFT

_SHORT = 1.0  # seconds for gloo's workers, which may hang on a rank that is lost


def leave(error: BaseException | None) -> None:
    """End all process groups; `error` is what ends this rank, None at the end of a job."""
    failed = error is not None and not _is_good_exit(error)
    _end_travels(warns=not failed)
    if failed and _may_wait_for_a_device():
        assert error is not None, "it has failed"
        _print_at_once(error)
        settle_all_groups(_SHORT)
        _abort()
    else:
        settle_all_groups()
        dist.destroy_process_group()


def _end_travels(*, warns: bool) -> None:
    """Give up gradients that travel (`overlap`): parameters are the last true ones again."""
    for late in list(LATE):
        if late.abandon() and warns:
            warnings.warn(LEFT.format(what=f"the process group of {late.run.name}"), RuntimeWarning, stacklevel=4)


def _is_good_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _may_wait_for_a_device() -> bool:
    """Whether some group has a backend that runs its collectives on a device: any but gloo, such as nccl."""
    pairs = [
        pair.partition(":")[::2]
        for config in distributed_c10d._world.pg_backend_config.values()
        for pair in config.split(",")
    ]
    return any(device != "cpu" and name != "gloo" for device, name in pairs)


def _print_at_once(error: BaseException) -> None:
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    print(  # noqa: T201 - Python itself prints it when the process ends, and that may be late
        f"rank {dist.get_rank()} of {dist.get_world_size()} leaves gradsync.process_group() with an exception "
        f"and aborts its process group:\n{''.join(lines)}",
        file=sys.stderr,
        flush=True,
    )


def _abort() -> None:
    try:
        distributed_c10d._abort_process_group()
    except RuntimeError as unable:  # not every backend can
        print(f"The process group could not be aborted: {unable}", file=sys.stderr, flush=True)  # noqa: T201
