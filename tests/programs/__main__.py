"""Random programs of gradsync calls on 1 to 3 real ranks, as many as you like.

    python -m tests.programs --programs 5000 --seed 1

A failing program is shrunk and printed; `--program FILE` runs one from a file again.
"""

from __future__ import annotations

import argparse
import ast
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice on find_unused_parameters

from tests.programs.running import run, run_many
from tests.programs.telling import run_stories, show
from tests.support.ranks import Ranks


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stories", type=int, help="tell so many stories of participants that change, instead")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--program", help="a file with one program, as a failure prints it")
    args = parser.parse_args()
    pools: dict[int, Ranks] = {}

    def pool(size: int) -> Ranks:
        return pools.setdefault(size, Ranks(size))

    try:
        if args.program:
            run(ast.literal_eval(Path(args.program).read_text()), pool)
            print("as the model says")
        elif args.stories:
            told = run_stories(args.stories, pool, args.seed, shrink=not args.no_shrink)
            print(show(told), *told.refusals.most_common(), sep="\n")
        else:
            print(run_many(args.programs, pool, args.seed, shrink=not args.no_shrink))
    finally:
        for one in pools.values():
            one.stop()


if __name__ == "__main__":
    main()
