"""The example files, each run as a program, on one process and under torchrun on two."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT, TORCHRUN, Program, Programs

EXAMPLES = ROOT / "examples"
TIME_LIMIT = 120  # seconds for all of them; on an idle machine they take 20

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

Runs = dict[tuple[str, int], str]


@pytest.fixture(scope="module")
def runs(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What each prints; all begin at once, and each must exit with 0, within the limit."""
    no_tqdm = tmp_path_factory.mktemp("no_tqdm")
    (no_tqdm / "tqdm.py").write_text("raise ImportError\n")

    def begin(name: str, script: str, *options: str, ranks: int) -> Program:
        command = [*(TORCHRUN if ranks == 2 else []), str(EXAMPLES / script), *options]
        path = [ROOT, EXAMPLES, *([no_tqdm] if "sync_every" in name else [])]
        environment = {"PYTHONPATH": os.pathsep.join(map(str, path))}
        return programs.start(*command, limit=TIME_LIMIT, environment=environment)

    running = {(name, ranks): begin(name, *command, ranks=ranks) for name, command in COMMANDS.items() for ranks in (1, 2)}
    running |= {(name, 1): begin(name, *command, ranks=1) for name, command in TAILS.items()}
    running["gpt overlapped", 2] = begin("gpt overlapped", *OVERLAPPED, ranks=2)
    printed = {}
    for run, program in running.items():
        code, printed[run], complaints = program.ended()
        assert code == 0, f"{program.title} exited with {code}:\n{printed[run]}\n{complaints}"
    return printed


def numbers(pattern: str, printed: str) -> list[float]:
    """The groups of `pattern`, which occurs once: one rank speaks for all."""
    found = re.findall(pattern, printed)
    assert len(found) == 1, printed
    return [float(number) for number in found[0]]


def gpt_losses(runs: Runs, name: str, ranks: int) -> list[float]:
    return numbers(r"loss per byte .*: (\S+) at first, (\S+) now", runs[name, ranks])


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
    assert re.search(r"^10/16 loss \d\.\d{3}$", runs["gpt_sync_every", 1], re.MULTILINE)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gan_learns_with_two_cadences(runs: Runs, ranks: int) -> None:
    printed = runs["gan", ranks]
    # 402 micro-batches: 201 windows of 2; 100 windows of 4, and a tail of 2.
    assert numbers(r"(\d+) updates of the discriminator, (\d+) of the generator", printed) == [201, 101]
    first, last = numbers(r"distance to the data (\S+) -> (\S+),", printed)
    assert last < 0.7 * first


def outcome(runs: Runs, name: str, ranks: int) -> tuple[float, float, str]:
    printed = runs[name, ranks]
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
