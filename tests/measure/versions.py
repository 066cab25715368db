"""The engine tests on other versions of torch: makes an environment for each, runs, removes it, and prints the table.

    python -m tests.measure.versions 2.9.1 2.15.0            # all engine tests
    python -m tests.measure.versions 2.15.0 -- -k fsdp2      # with arguments for pytest
    python -m tests.measure.versions --keep 2.15.0           # leaves the environment, for the next run

An environment takes 5 to 7 GB, because pip's torch comes with CUDA; it runs on a CPU. One is on disk at a time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = [
    "tests/engines", "tests/uneven/test_table.py", "tests/resume/test_engines.py",
]  # fmt: skip
BESIDE = ["pytest>=8.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "numpy>=1.26", "typing-extensions>=4.12", "wrapt>=1.17"]


def environment(version: str, folder: Path) -> Path:
    """The Python of an environment with this torch, made if it is not there."""
    home = folder / f"torch-{version}"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", f"torch=={version}", *BESIDE], check=True
        )
        (home / "ready").touch()
    return python


# What an old torch cannot do: `sync="shard"` on HSDP, which is an error there; and what these tests cannot ask it:
# gloo tells the flight recorder of nothing.
BEFORE_2_10 = " and not fsdp2_tp and not several_meshes"  # tensor parallelism beside fully_shard is wrong there
BEFORE_2_13 = (
    "(not shard or no_shard) and not piece and not which_parameters and not (partial and reduction) "
    "and not switches_are_put_back and not what_a_window_sends and not test_fsdp2_unused "
    "and not (each and some_ranks_leave_out)"
)


def run(python: Path, version: str, arguments: list[str]) -> str:
    """The last line that pytest prints."""
    chosen = arguments if any(one.startswith("tests/") for one in arguments) else [*TESTS, *arguments]
    if tuple(map(int, version.split(".")[:2])) < (2, 13) and "-k" not in arguments:
        older = tuple(map(int, version.split(".")[:2])) < (2, 10)
        chosen = [*chosen, "-k", BEFORE_2_13 + (BEFORE_2_10 if older else "")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return re.sub(r"\x1b\[[0-9;]*m", "", last).strip("= ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="of torch, as pip knows them")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "gradsync-versions")
    parser.add_argument("--keep", action="store_true", help="leave the environments on disk")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, arguments = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    rows = []
    for version in options.versions:
        print(f"-- torch {version}", flush=True)
        try:
            rows.append((version, run(environment(version, options.folder), version, arguments)))
        finally:
            if not options.keep:
                shutil.rmtree(options.folder / f"torch-{version}", ignore_errors=True)
    print("\n| torch | engine tests |\n|---|---|")
    for version, result in rows:
        print(f"| {version} | {result} |")


if __name__ == "__main__":
    main()
