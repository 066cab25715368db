"""One rank on the fake device: runs a case, and leaves what it returned, or its traceback, in a file.

    python -m tests.device.rank FOLDER RANK
"""

from __future__ import annotations

from tests.device import fake  # noqa: F401 - before torch, I001

import contextlib
import importlib
import os
import pickle
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=40)  # shorter than the limit of a case, so that a rank can say what it waited for


def main(folder: Path, rank: int) -> None:
    module, name, args, ranks = pickle.loads((folder / "case").read_bytes())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        if ranks > 1:
            store = f"file://{folder / 'store'}"
            dist.init_process_group("likenccl", init_method=store, rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT)
        case = importlib.import_module(module)
        for part in name.split("."):
            case = getattr(case, part)
        outcome = (True, case(*args))
        _wait_for_the_others()
    except BaseException:
        outcome = (False, traceback.format_exc())
    (folder / f"outcome{rank}").write_bytes(pickle.dumps(outcome))
    sys.stderr.flush()
    os._exit(0)  # the group is left without ceremony: how to leave it well is another test


def _wait_for_the_others() -> None:
    """Leave when all are done: a process that ends takes its connections with it. One that failed does not come."""
    if dist.is_initialized():
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
            warnings.simplefilter("ignore")
            dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
