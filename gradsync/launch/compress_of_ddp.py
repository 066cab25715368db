"""Gradients that travel in bfloat16: half the bytes, two to three significant digits.

torch has such a hook, but refuses it on a CPU by its name (torch 2.13, `DDP._check_comm_hook`), although gloo can add
up bfloat16. The hook here works on every backend. It and its state can be pickled, because a `DistributedDataParallel`
is pickled with both.
"""

# No annotations from __future__: torch reads the annotations of a hook, and takes no strings.

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradsync._errors import GradSyncError


@dataclass(frozen=True)
class Over:
    """The ranks over which `compressed_mean` averages: those of `group`, None for all.

    A pickled `DistributedDataParallel` forgets its group and takes the default one where it is loaded; so does this.
    """

    group: dist.ProcessGroup | None

    def __reduce__(self) -> tuple[type["Over"], tuple[None]]:
        return Over, (None,)


def compress_gradients(ddp: DistributedDataParallel) -> None:
    """Have the gradients of a `DistributedDataParallel` travel in bfloat16. Twice is the same as once."""
    if "comm_hook" not in ddp._get_ddp_logging_data():
        # A copied DDP has the list of hooks of the original, but a reducer without hooks.
        ddp._comm_hooks = [(hook, state) for hook, state in ddp._comm_hooks if hook is not compressed_mean]
        ddp.register_comm_hook(Over(ddp.process_group), compressed_mean)
        return
    others = [hook for hook, _ in ddp._comm_hooks if hook is not compressed_mean]
    if others or not ddp._comm_hooks:
        name = getattr(others[0], "__name__", others[0]) if others else "one of torch's own"
        raise GradSyncError(
            'compress="bf16" needs the place of the communication hook, but this DistributedDataParallel has one '
            f"already: {name}. Leave one of the two out."
        )


def compressed_mean(state: Over, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket over the ranks: each rank's share is rounded to bfloat16, and added up in bfloat16."""
    buffer = bucket.buffer()
    group = state.group or dist.group.WORLD
    assert group is not None, "a reducer has a group"
    # Divided first, like in DDP: the sum over many ranks may overflow where their mean does not.
    share = buffer.to(torch.bfloat16).div_(group.size())
    travelling = dist.all_reduce(share, group=group, async_op=True).get_future()  # pyright: ignore[reportOptionalMemberAccess]

    def arrived(future: torch.futures.Future[Any]) -> torch.Tensor:
        return buffer.copy_(future.value()[0])

    mean: torch.futures.Future[torch.Tensor] = travelling.then(arrived)
    return mean
