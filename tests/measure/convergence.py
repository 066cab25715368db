"""What overlap costs in quality: the small GPT of examples/ trained exactly, overlapped, and with the naive delay.

    python -m tests.measure.convergence [--ranks 2] [--seeds 3] [--updates 600] [--steps 4]

AdamW with OneCycleLR up to 1e-2, gradients clipped to 1, micro-batches of 4 paragraphs.
Simulated on one process, so that ranks cost nothing but their computing: for each rank a copy of the provisional
parameters, as `accumulating(overlap=steps)` keeps them (tests/overlap holds the same against real ranks). The naive
delay applies the gradients one window late, and computes on parameters that have nothing newer in them. Prints the
loss on held-out paragraphs for each seed, and how far above exact the means are.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import small_gpt

CLIP = 1.0


def gradients(model, batches) -> tuple[list[torch.Tensor], int]:
    """The summed gradients of micro-batches, and what they are sums over."""
    count = 0
    model.zero_grad()
    for batch in batches:
        total, number = model.loss(batch)
        total.backward()
        count += int(number)
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found, count


def step(model, optimizer, sums, count, scheduler=None) -> None:
    for p, g in zip(model.parameters(), sums, strict=True):
        p.grad = g / count
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    model.zero_grad()
    if scheduler is not None:
        scheduler.step()


def added(parts):
    return [sum(each) for each in zip(*(sums for sums, _ in parts), strict=True)], sum(count for _, count in parts)


def train(way: str, seed: int, args) -> float:
    torch.manual_seed(seed)
    training, held_out = small_gpt.paragraphs()
    per_window = args.ranks * args.steps
    plan = small_gpt.plan(training, args.updates * per_window, seed)
    model = small_gpt.GPT(width=args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total = args.updates + 1
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=total, pct_start=0.1)
    ahead = [model] * args.ranks
    travelling = None
    for window in range(args.updates):
        batches = [small_gpt.padded([training[i] for i in one]) for one in plan[window * per_window :][:per_window]]
        own = [gradients(ahead[rank], batches[rank :: args.ranks]) for rank in range(args.ranks)]
        if way == "exact":
            step(model, optimizer, *added(own), scheduler)
            continue
        if travelling is not None:
            step(model, optimizer, *travelling, scheduler)
        travelling = added(own)
        if way == "overlapped":
            for rank in range(args.ranks):
                ahead[rank], its = copy.deepcopy((model, optimizer))
                step(ahead[rank], its, *own[rank])
        else:
            ahead = [copy.deepcopy(model)] * args.ranks  # as they were before what travels
    if travelling is not None:
        step(model, optimizer, *travelling, scheduler)
    return model.mean_loss(held_out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--steps", type=int, default=4, help="micro-batches of a rank in a window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-2, help="the highest of the cycle")
    args = parser.parse_args()
    torch.set_num_threads(1)
    losses: dict[str, list[float]] = {way: [] for way in ("exact", "overlapped", "delayed")}
    began = time.monotonic()
    for seed in range(args.seeds):
        for way, seen in losses.items():
            seen.append(train(way, seed, args))
        told = ", ".join(f"{way} {seen[-1]:.3f}" for way, seen in losses.items())
        print(f"seed {seed}: {told}  ({time.monotonic() - began:.0f} s)", flush=True)
    means = {way: sum(seen) / len(seen) for way, seen in losses.items()}
    print(f"{args.ranks} ranks, windows of {args.steps}, {args.updates} updates, means of {args.seeds} seeds:")
    for way, mean in means.items():
        print(f"  {way:11} {mean:.3f}  {mean - means['exact']:+.3f}")


if __name__ == "__main__":
    main()
