"""The small GPT's loss over wall-clock time on two emulated hosts, each way to accumulate beside the others in one run.

    python -m tests.measure.loss_over_time --png loss.png            # Linux, root, iproute2, matplotlib
    python -m tests.measure.loss_over_time --link loopback           # anywhere

The ways take turns of a few updates, so that what else the machine does meets them all alike; each has a clock of its own,
which stands still during the others' turns and while a loss is measured. What still travels at the end of a turn is
waited for within the turn: longer turns (--turn) show overlapping better. Ways that this gradsync cannot run are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync.bench import _hosts, _window_cost
from gradsync.bench._cli import ending_on_signals
from gradsync.bench._remedies import REMEDIES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
from small_gpt import GPT, PAD, padded, paragraphs, plan  # noqa: E402

STEPS = 4  # micro-batches of one rank in a window
RATE = 1e-2
TITLES = {
    "no_sync": "no_sync by hand",
    "accumulating": "accumulating",
    "overlap": "overlapped",
    "both": "overlapped and compressed",
}
COLOURS = {"no_sync": "#1f77b4", "accumulating": "#2ca02c", "overlap": "#bcbd22", "both": "#d62728"}


@dataclass
class Runner:
    """One way: what trains for some updates, its clock, and the losses found on its way."""

    model: torch.nn.Module
    train: object
    seconds: float = 0.0
    points: list[tuple[float, int, float]] = field(default_factory=list)


def mean_loss(model, sequences):
    logits = model(sequences[:, :-1])
    return cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten(), ignore_index=PAD)


def trained_by(model, updates):
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=updates + 1, pct_start=0.1)


def by_hand(batches, updates):
    model = GPT()
    ddp, (optimizer, scheduler) = DDP(model), trained_by(model, updates)
    rest = iter(batches)

    def train(count):
        for index, batch in enumerate(itertools.islice(rest, count * STEPS), start=1):
            last = index % STEPS == 0
            with nullcontext() if last else ddp.no_sync():
                (mean_loss(ddp, batch) / STEPS).backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return Runner(model, train)


def decorated(batches, updates, keywords):
    @gradsync.accumulating(steps=STEPS, clip_norm=1.0, **keywords)
    def train_step(model, optimizer, scheduler, batch):
        return mean_loss(model, batch)

    model = GPT()
    optimizer, scheduler = trained_by(model, updates)
    rest = iter(train_step.over(batches))

    def train(count):
        for batch in itertools.islice(rest, count * STEPS):
            train_step(model, optimizer, scheduler, batch)
        if "overlap" in keywords:
            train_step.settle()  # the loss is measured on true parameters, and the others' turns are not disturbed

    return Runner(model, train)


def seconds_of(run):
    """The slowest rank's, the median of a few."""
    took = []
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    slowest = torch.tensor(median(took))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def race(args):
    """On each rank; what each way found, on each alike but for the clocks: the slowest rank's count."""
    torch.set_num_threads(1)
    with gradsync.process_group() as world:
        training, held_out = paragraphs()
        mine = plan(training, args.updates * STEPS * world.world_size, args.seed)[world.rank :: world.world_size]
        batches = [padded([training[i] for i in batch]) for batch in mine]
        held_out = held_out[: args.held_out]

        model = GPT()
        micro_batch = seconds_of(lambda: mean_loss(model, batches[0]).backward())
        gradients = torch.zeros(sum(p.numel() for p in model.parameters()))
        link = seconds_of(lambda: dist.all_reduce(gradients))

        runners, overlap = {}, {}
        for name in args.ways:
            torch.manual_seed(args.seed)
            if name == "no_sync":
                runners[name] = by_hand(batches, args.updates)
                continue
            keywords = {}
            if name in REMEDIES:
                overlap[name] = _window_cost.num_hiding(link * REMEDIES[name].bytes_sent, micro_batch, STEPS)
                keywords = REMEDIES[name].keywords(overlap[name])
            runners[name] = decorated(batches, args.updates, keywords)
        for done in range(0, args.updates + 1, args.turn):
            for name in args.ways[done // args.turn % len(args.ways) :] + args.ways[: done // args.turn % len(args.ways)]:
                runner = runners[name]
                if done:
                    dist.barrier()
                    began = time.perf_counter()
                    runner.train(args.turn)
                    took = torch.tensor(time.perf_counter() - began)
                    dist.all_reduce(took, dist.ReduceOp.MAX)
                    runner.seconds += float(took)
                if world.rank == 0:
                    runner.points.append((runner.seconds, done, runner.model.mean_loss(held_out)))
            if world.rank == 0 and done:
                print(f"{done} of {args.updates} updates", file=sys.stderr, flush=True)
        if world.rank == 0:
            points = {name: runner.points for name, runner in runners.items()}
            found = {"points": points, "overlap": overlap, "micro_batch": micro_batch, "link": link}
            Path(args.result).write_text(json.dumps(found))


def start(args, words, folder):
    """Both ranks, a host each, to their end."""
    on_hosts = args.link != "loopback"
    with _hosts.two_hosts(args.link) if on_hosts else nullcontext() as hosts, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        common = {
            **os.environ, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
            "GLOO_SOCKET_IFNAME": _hosts.INTERFACE if hosts else "lo", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.measure.loss_over_time", *words, "--result", str(folder / "result.json")]
        ranks = []
        try:
            for rank in range(2):
                enter = hosts[rank].enter if hosts else ()
                ranks.append(subprocess.Popen([*enter, *command], cwd=ROOT, env={**common, "RANK": str(rank)}))
            codes = [rank.wait(timeout=args.limit) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if codes != [0, 0]:
        sys.exit(f"The ranks ended with the exit codes {codes}.")
    return json.loads((folder / "result.json").read_text())


def time_to(loss, points):
    """Seconds until the loss is reached, on the line between the points around it; None if it never is."""
    for (before, _, high), (after, _, low) in itertools.pairwise(points):
        if low <= loss:
            return before if high <= loss else before + (after - before) * (high - loss) / (high - low)
    return None


def draw(found, loss, args):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in found["points"].items():
        x, y = [seconds for seconds, _, _ in points], [value for _, _, value in points]
        axes.plot(x, y, color=COLOURS[name], marker=".", linewidth=1.2, label=title(name, found))
    axes.axhline(loss, color="black", linestyle="--", linewidth=0.8, label=f"loss {loss:.3f}")
    axes.set_xlabel("seconds of training (wall clock)")
    axes.set_ylabel("loss per byte of held-out text")
    axes.set_title(f"small GPT, AdamW, windows of {STEPS}, 2 ranks, link {args.link}, {args.updates} updates")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.png, dpi=150)


def title(name, found):
    overlap = found["overlap"].get(name)
    return TITLES[name] + (f", overlap={overlap}" if overlap else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit", help="as tc writes it, or loopback; default: 100mbit")
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--turn", type=int, default=20, help="updates after which the next way trains; default: 20")
    parser.add_argument("--ways", default="no_sync,overlap,both", help=f"of {','.join(TITLES)}")
    parser.add_argument("--loss", type=float, help="to which the times are told; default: the worst way's best")
    parser.add_argument("--held-out", type=int, default=256, help="paragraphs on which the loss is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds")
    parser.add_argument("--png")
    parser.add_argument("--result", help=argparse.SUPPRESS)  # a rank writes it
    args = parser.parse_args()
    args.ways = args.ways.split(",")
    if unknown := [name for name in args.ways if name not in TITLES]:
        parser.error(f"there is no way named {unknown[0]}; there are {', '.join(TITLES)}")
    if args.turn < 1 or args.updates < 1 or args.updates % args.turn:
        parser.error(f"--updates must be a multiple of --turn; they came as {args.updates} and {args.turn}")
    lacking = {name: REMEDIES[name].lacking(gradsync.accumulating) for name in args.ways if name in REMEDIES}
    args.ways = [name for name in args.ways if not lacking.get(name)]
    if args.result:
        return race(args)
    for name, keywords in lacking.items():
        if keywords:
            print(f"Left out: {TITLES[name]}; `gradsync.accumulating` has no {' and no '.join(keywords)} in this version.")
    # A kill, too, takes the hosts and the ranks down.
    with ending_on_signals(), tempfile.TemporaryDirectory() as folder:
        found = start(args, sys.argv[1:], Path(folder))
    points = found["points"]
    loss = args.loss or max(min(value for _, _, value in line) for line in points.values())
    print(f"link {args.link}: {1000 * found['link']:.1f} ms for the gradients, {1000 * found['micro_batch']:.1f} a micro-batch")
    first = time_to(loss, next(iter(points.values())))
    for name, line in points.items():
        reached = time_to(loss, line)
        told = "never" if reached is None else f"{reached:.1f} s"
        ratio = f" ({reached / first:.2f} of {TITLES[next(iter(points))]})" if reached and first else ""
        print(
            f"{title(name, found):<40} {1000 * line[-1][0] / args.updates:7.1f} ms an update, loss {line[-1][2]:.4f} at the end, "
            f"loss {loss:.4f} after {told}{ratio}"
        )
    if args.png:
        draw(found, loss, args)


if __name__ == "__main__":
    main()
