"""What the provisional step costs: saving, stepping once more, putting back, for 1M to 100M parameters.

    python -m tests.measure.overlap [millions ...]

Prints medians in ms and the memory of what is saved; the first window, whose pages are new, apart. "watch" is the
hooks of `state_dict` and the versions of parameters, for one window.
"""

from __future__ import annotations

import os
import sys
import time
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from gradsync.functional import Who
from gradsync.overlap.provisional import provisional_step
from gradsync.overlap.saved import Saved
from gradsync.overlap.watch import Watch

WINDOWS = 7
KINDS = {
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


def timed(what):
    start = time.perf_counter()
    value = what()
    return value, 1e3 * (time.perf_counter() - start)


def measure(millions: float, kind: str) -> str:
    width = round((millions * 1e6 / 16) ** 0.5)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(16)])
    optimizer = KINDS[kind](list(model.parameters()))

    def give():
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-3)

    give()
    optimizer.step()
    spare, rows, first = None, [], 0.0
    for window in range(WINDOWS):
        give()
        _, step = timed(optimizer.step)
        saved, save = timed(lambda: Saved.of([optimizer], spare))
        if not window:
            first = save
        _, back = timed(saved.put_back)
        give()
        made, whole = timed(lambda: provisional_step([optimizer], factor=0.25, clip_norm=1.0, spare=saved))
        made.put_back()
        watch, on = timed(lambda: Watch(list(model.parameters()), Who([model], [optimizer]), print))
        _, off = timed(lambda: (watch.check(), watch.end()))
        rows.append((step, save, back, whole, on + off))
        spare = made
    step, save, back, whole, watched = (median(column) for column in zip(*rows[1:]))
    memory = sum(copy.nbytes for copy in made.copies.copies) / 2**20
    number = sum(p.numel() for p in model.parameters()) / 1e6
    return (
        f"{number:6.1f}  {kind:14}{step:9.1f}{save:9.1f}{first:9.1f}{back:9.1f}{whole:12.1f}{watched:9.2f}{memory:10.0f}"
    )


def main() -> None:
    torch.set_num_threads(1)
    print("     M  optimizer          step     save    first     back  provisional    watch       MiB")
    for millions in [float(one) for one in sys.argv[1:]] or (1.0, 8.4, 30.0, 100.0):
        for kind in KINDS:
            print(measure(millions, kind), flush=True)


if __name__ == "__main__":
    main()
