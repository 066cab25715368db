"""The example files, each run as a user would, on one process and under torchrun on two."""

from __future__ import annotations

import difflib
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import gradsync

EXAMPLES = Path(__file__).parents[2] / "examples"
TIME_LIMIT = 120  # seconds for one command; on an idle machine the longest takes 8
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

COMMANDS = {
    "gpt": ["gpt.py", "--quick"],
    "gpt_sync_every": ["gpt_sync_every.py", "--quick"],
    "gan": ["gan.py", "--quick"],
    "before": ["before.py"],
    "after": ["after.py"],
    "resume": ["resume.py", "--quick"],
}
OVERLAPPED = ["gpt.py", "--quick", "--overlap", "2"]
TAILS = {"before tail": ["before.py", "--batches", "30"], "after tail": ["after.py", "--batches", "30"]}

Runs = dict[tuple[str, int], "Future[str]"]


def run(command: list[str], ranks: int, path: list[Path]) -> str:
    """What the example prints; it must exit with 0, within the limit."""
    script, *options = command
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(map(str, path)))
    process = subprocess.Popen(
        [sys.executable, *(TORCHRUN if ranks == 2 else []), str(EXAMPLES / script), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={**environment, "PYTHONIOENCODING": "utf-8"},
        start_new_session=True,  # so that torchrun's workers go with it
    )
    try:
        printed, complaints = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, complaints = process.communicate()
        raise AssertionError(f"{script} on {ranks} hung:\n{printed}\n{complaints}") from None
    assert process.returncode == 0, f"{script} on {ranks} exited with {process.returncode}:\n{printed}\n{complaints}"
    return printed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All runs, two at a time, begun at once."""
    library = Path(gradsync.__file__).parents[1]
    no_tqdm = tmp_path_factory.mktemp("no_tqdm")
    (no_tqdm / "tqdm.py").write_text("raise ImportError\n")
    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = {
            (name, ranks): pool.submit(run, command, ranks, [library, *([no_tqdm] if "sync_every" in name else [])])
            for name, command in COMMANDS.items()
            for ranks in (1, 2)
        }
        futures["gpt overlapped", 2] = pool.submit(run, OVERLAPPED, 2, [library])
        futures |= {(name, 1): pool.submit(run, command, 1, [library]) for name, command in TAILS.items()}
        yield futures
        for future in futures.values():
            future.cancel()


def numbers(pattern: str, printed: str) -> list[float]:
    """The groups of `pattern`, which occurs once: one rank speaks for all."""
    found = re.findall(pattern, printed)
    assert len(found) == 1, printed
    return [float(number) for number in found[0]]


def gpt_losses(runs: Runs, name: str, ranks: int) -> list[float]:
    return numbers(r"loss per byte .*: (\S+) at first, (\S+) now", runs[name, ranks].result())


@pytest.mark.parametrize("name", ["gpt", "gpt_sync_every"])
def test_the_gpt_learns(runs: Runs, name: str) -> None:
    first, last = gpt_losses(runs, name, 1)
    assert first > 5.5
    assert last < 3.2


@pytest.mark.parametrize("name", ["gpt", "gpt_sync_every"])
def test_the_gpt_ends_the_same_on_one_process_and_on_two(runs: Runs, name: str) -> None:
    assert gpt_losses(runs, name, 2) == pytest.approx(gpt_losses(runs, name, 1), rel=1e-9)


def test_the_gpt_overlapped_learns_nearly_as_much(runs: Runs) -> None:
    """16 updates, the first of which matter most; how near it comes in the end, tests/measure/convergence.py shows."""
    exact, overlapped = (gpt_losses(runs, name, 2)[1] for name in ("gpt", "gpt overlapped"))
    assert exact != overlapped
    assert overlapped == pytest.approx(exact, abs=0.15)


def test_both_loops_of_the_gpt_end_the_same(runs: Runs) -> None:
    assert gpt_losses(runs, "gpt_sync_every", 1) == pytest.approx(gpt_losses(runs, "gpt", 1), rel=1e-9)


def test_the_gpt_shows_its_progress_without_tqdm(runs: Runs) -> None:
    assert re.search(r"^10/16 loss \d\.\d{3}$", runs["gpt_sync_every", 1].result(), re.MULTILINE)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gan_learns_with_two_cadences(runs: Runs, ranks: int) -> None:
    printed = runs["gan", ranks].result()
    # 402 micro-batches: 201 windows of 2; 100 windows of 4, and a tail of 2.
    assert numbers(r"(\d+) updates of the discriminator, (\d+) of the generator", printed) == [201, 101]
    first, last = numbers(r"distance to the data (\S+) -> (\S+),", printed)
    assert last < 0.7 * first


def outcome(runs: Runs, name: str, ranks: int) -> tuple[float, float, str]:
    printed = runs[name, ranks].result()
    found = re.findall(r"loss (\S+) -> (\S+), parameters ([0-9a-f]{16})", printed)
    assert len(found) == 1, printed
    return float(found[0][0]), float(found[0][1]), found[0][2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_before_and_after_end_with_the_same_bits(runs: Runs, ranks: int) -> None:
    before, after = outcome(runs, "before", ranks), outcome(runs, "after", ranks)
    assert before == after
    assert after[1] < 0.2 * after[0]


def test_before_and_after_differ_where_the_last_window_is_short(runs: Runs) -> None:
    assert outcome(runs, "before tail", 1)[2] != outcome(runs, "after tail", 1)[2]


def test_from_before_to_after_is_a_short_diff() -> None:
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("before.py", "after.py"))
    changed = [line for line in difflib.unified_diff(before, after, n=0) if re.match(r"[+-](?![+-])", line)]
    assert sum(line.startswith("+") for line in changed) <= 12
    assert len(changed) <= 40


def test_every_example_is_run() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts - {"small_gpt.py"} == {script for script, *_ in COMMANDS.values()}


def test_examples_import_torch_gradsync_and_the_standard_library_only() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "gradsync", "small_gpt", "tqdm"}
    for path in EXAMPLES.glob("*.py"):
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        assert imported <= allowed, path.name
