"""One rank, which measures with the others; rank 0 gets the result. Also a program, which `_launch` starts."""

import faulthandler
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gradsync.bench._errors import BenchError
from gradsync.bench._records import Measured, Options, Place, dump_measured, load_task

TASK, PROGRESS, RESULT = "task.json", "progress", "result.json"
"""The files through which a rank and the bench that started it communicate."""


def run(options: Options, place: Place, say: Callable[[str], None]) -> Measured | None:
    """Measure with the other ranks of this process's group; only rank 0 gets the result."""
    # A rank that waits too long for another rank writes where it stands, and ends.
    faulthandler.dump_traceback_later(options.limit, exit=True)
    import torch
    import torch.distributed as dist

    import gradsync
    from gradsync.bench._measure import measure, num_gradient_bytes
    from gradsync.bench._models import build
    from gradsync.bench._ways import obstacle

    torch.set_num_threads(options.threads)
    with gradsync.process_group() as group:
        on_ranks: list[dict[str, str]] = [{} for _ in range(group.world_size)]
        dist.all_gather_object(on_ranks, {name: why for name in options.ways if (why := obstacle(name)) is not None})
        missing = {name: why for obstacles in on_ranks for name, why in obstacles.items()}
        possible = replace(options, ways=tuple(name for name in options.ways if name not in missing))
        samples = []
        for steps in options.steps:

            def report(text: str, steps: int = steps) -> None:
                if group.rank == 0:
                    say(f"{place.name}{f', {place.link}' if place.link else ''}, windows of {steps}: {text}")

            samples.append(measure(possible, place, steps, group.device, report))
            gc.collect()  # engines must go now, on all ranks together, and before their process group
        workload = build(options, group.device)
        measured = Measured(
            place,
            torch=torch.__version__,
            backend=dist.get_backend(),
            device=group.device.type,
            parameters=sum(p.numel() for p in workload.model.parameters()),
            gradient_bytes=num_gradient_bytes(workload),
            optimizer=type(workload.optimizer).__name__,
            missing=missing,
            samples=samples,
        )
    faulthandler.cancel_dump_traceback_later()
    return measured if group.rank == 0 else None


def _main(folder: Path) -> None:
    threading.Thread(target=_end_with_the_bench, daemon=True).start()
    options, place = load_task((folder / TASK).read_text())
    # The bench's limit begins when it writes the task, and on a busy machine Python's imports take long.
    late = time.time() - (folder / TASK).stat().st_mtime
    options = replace(options, limit=max(1.0, options.limit - late))
    with (folder / PROGRESS).open("a", buffering=1) as progress:
        try:
            measured = run(options, place, lambda text: print(text, file=progress))
        except BenchError as error:
            sys.exit(str(error))
    if measured is not None:
        (folder / RESULT).write_text(dump_measured(measured))


def _end_with_the_bench() -> None:
    # Standard input is a pipe. It closes when the process that started this one ends, for whatever reason.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
