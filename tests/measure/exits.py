"""Run commands under torchrun with 2 ranks again and again, and count how they exit.

    python -m tests.measure.exits --runs 100 examples/gpt.py --quick
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--runs", type=int, default=100)
parser.add_argument("--time-limit", type=float, default=120)
parser.add_argument("command", nargs=argparse.REMAINDER)
args = parser.parse_args()

exits, aborts = collections.Counter(), 0
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
for run in range(1, args.runs + 1):
    done = subprocess.run(
        [*torchrun, *args.command],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        capture_output=True,
        text=True,
        timeout=args.time_limit,
    )
    exits[done.returncode] += 1
    aborts += "terminate called" in done.stderr
    if done.returncode:
        print(done.stderr[-2000:])
    print(f"\r{run} of {args.runs}: exit codes {dict(exits)}, terminate called in {aborts}", end="", flush=True)
print()
