"""What `compress="bf16"` rounds: gradients of the small GPT of examples/, and its loss, beside exact ones.

    python -m tests.measure.compress [--ranks 2 3 8] [--updates 60]

For each number of ranks, real processes on gloo. The error is that of one window's gradients, as a share of their norm
(the median over the windows), and of each element, as a share of the exact one (median and 99th percentile over those
that are not zero); both ways compute in float64, so that nothing else is rounded. The loss is that of held-out
paragraphs after the updates, in float32. Tables and flags are exact, and so is the sum of the counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

import gradsync

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import small_gpt

STEPS, WINDOWS, SEED = 4, 6, 0


def batches(rank: int, size: int, updates: int):
    """This rank's micro-batches, window by window."""
    training, _ = small_gpt.paragraphs()
    plan = small_gpt.plan(training, updates * STEPS * size, SEED)[rank::size]
    return [small_gpt.padded([training[i] for i in one]) for one in plan]


def gradients(compress: str | None, rank: int, size: int) -> list[torch.Tensor]:
    """Of each window, on the same parameters: SGD that moves by one gradient, and is taken back."""
    torch.manual_seed(SEED)
    model = small_gpt.GPT().double()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []

    def back(_) -> None:
        found.append(torch.cat([(start[name] - p.detach()).flatten() for name, p in model.named_parameters()]))
        model.load_state_dict(start)

    @gradsync.accumulating(steps=STEPS, compress=compress, on_update=back)
    def step(model, optimizer, batch):
        return gradsync.LossSum(*model.loss(batch))

    for batch in step.over(batches(rank, size, WINDOWS)):
        step(model, optimizer, batch)
    return found


def loss(compress: str | None, rank: int, size: int, updates: int) -> float:
    """On held-out paragraphs, after some updates."""
    torch.manual_seed(SEED)
    model = small_gpt.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    @gradsync.accumulating(steps=STEPS, compress=compress, clip_norm=1.0)
    def step(model, optimizer, batch):
        return gradsync.LossSum(*model.loss(batch))

    for batch in step.over(batches(rank, size, updates)):
        step(model, optimizer, batch)
    return model.mean_loss(small_gpt.paragraphs()[1])


def run(rank: int, size: int, store: str, updates: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    norms, middles, far = [], [], []
    for exact, rounded in zip(*(gradients(compress, rank, size) for compress in (None, "bf16")), strict=True):
        norms.append(float((rounded - exact).norm() / exact.norm()))
        share = ((rounded - exact)[exact != 0] / exact[exact != 0]).abs()
        middles.append(float(share.median()))
        far.append(float(share.sort().values[int(0.99 * len(share))]))
    losses = [loss(compress, rank, size, updates) for compress in (None, "bf16")]
    if rank == 0:
        shown = [f"{100 * median(one):.3f} %" for one in (norms, middles, far)]
        print(f"{size:5}  {shown[0]:>10}{shown[1]:>12}{shown[2]:>12}   {losses[0]:9.4f}{losses[1]:9.4f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 8])
    parser.add_argument("--updates", type=int, default=60)
    args = parser.parse_args()
    print("ranks   of the norm    an element  99th perc.   loss exact   bf16", flush=True)
    context = multiprocessing.get_context("fork")
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            words = [(rank, size, f"{folder}/store", args.updates) for rank in range(size)]
            ranks = [context.Process(target=run, args=one) for one in words]
            for one in ranks:
                one.start()
            for one in ranks:
                one.join()
        if any(one.exitcode for one in ranks):
            sys.exit(f"Ranks ended with the exit codes {[one.exitcode for one in ranks]}.")


if __name__ == "__main__":
    main()
