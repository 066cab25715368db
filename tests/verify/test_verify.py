"""`python -m gradsync verify`: the promises are tried on real ranks, and the exit code says whether all hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gradsync.verify import main
from gradsync.verify._arguments import parse
from gradsync.verify._cli import _engines
from gradsync.verify._report import Ranks, Report, Tried, as_markdown, as_text
from gradsync.verify.homes import HOMES
from gradsync.verify.table import CELLS, ROWS
from tests.launch.test_device import show
from tests.support.ranks import PATIENCE

LIMIT = 8 * PATIENCE  # seconds; the machine may be busy
FACTS = {"torch": "2", "python": "3", "machine": "here"}


def asked(engines, promises, limit=LIMIT) -> list[str]:
    return [*(f"--engine={one}" for one in engines), *(f"--promise={one}" for one in promises), "--device=cpu", f"--limit={limit}"]


def test_what_holds_is_said_and_the_exit_code_is_0(capfd):
    """One process and two ranks; a promise, an error that is one too, and what there is nothing to try of."""
    promises = ["full_windows", "uneven_over", "no_sync_then_sync_gradients", "a_parameter_used_only_early"]
    code = main([*asked(["none", "ddp_static"], promises), "--json"])
    told = json.loads(capfd.readouterr().out)
    assert code == 0 and told["holds"] is True
    assert [(one["ranks"], one["device"]) for one in told["on"]] == [(1, "cpu"), (2, "cpu")]
    assert told["on"][1]["backend"] == "gloo"
    holds = {(one["engine"], one["promise"]): one["holds"] for one in told["cells"]}
    assert holds == {(e, p): None if (e, p) == ("ddp_static", promises[3]) else True for e in ("none", "ddp_static") for p in promises}
    assert [one["promise"] for one in told["cells"] if "why_not" in one] == [promises[3]]


def test_a_broken_engine_is_told_of_and_the_exit_code_is_1(capfd):
    """What is wrong, hangs or dies in one cell is that cell's: the next ones are tried all the same."""
    promises = ["full_windows", "tail_over", "tail_flush", "reset"]
    command = [sys.executable, "-m", "tests.verify.broken"]
    limit = 4 * PATIENCE  # one cell hangs, and is waited for as long
    code = main([*asked(["bare"], promises, limit), "--json"], command)
    told = json.loads(capfd.readouterr().out)
    assert code == 1 and told["holds"] is False
    cells = {one["promise"]: one for one in told["cells"]}
    assert {name: one["holds"] for name, one in cells.items()} == dict(zip(promises, [False, False, False, True], strict=True))
    said = {name: [one["said"] for one in cells[name]["wrong"]] for name in promises[:3]}
    assert len(said["full_windows"]) == 2 and all("is off by" in text for text in said["full_windows"])
    assert any(f"it hangs: it had not ended after {limit:g} s, and stood at broken.py" in text for text in said["tail_over"])
    assert said["tail_flush"][0].startswith("its process was ended by SIGKILL")
    assert cells["tail_flush"]["wrong"][0]["rank"] == 1


def test_one_rank_alone_is_tried_in_a_group_of_its_own(capfd):
    """Where a machine has one device; what is an error only because ranks differ is none there."""
    promises = ["clipping", "compress", "uneven_iterator_from_nothing", "a_parameter_that_nobody_used"]
    code = main([*asked(["ddp"], promises), "--ranks=1", "--json"])
    told = json.loads(capfd.readouterr().out)
    assert code == 0 and told["on"] == [{"ranks": 1, "device": "cpu", "backend": "gloo"}]
    assert [(one["holds"], "error" in one) for one in told["cells"]] == [(True, False), (True, True), (True, False), (True, False)]


@pytest.mark.parametrize(("kind", "count", "expected"), [(None, 0, 2), ("cuda", 1, 1), ("cuda", 8, 2), ("mps", 1, 2)])
def test_each_rank_has_a_device_of_its_own_if_nothing_is_said(monkeypatch, kind, count, expected):
    show(monkeypatch, kind, count)
    assert list(_engines(parse(["--engine=ddp"]), None)) == [Ranks(expected)]


def test_nothing_tried_is_not_all_that_holds():
    report = Report(list(ROWS), {})
    assert not report.holds and "Nothing was tried." in as_text(report, FACTS)


def test_under_torchrun_its_ranks_are_those_that_are_tried():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "gradsync", "verify"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [*asked(["none", "ddp", "hsdp_window"], ["full_windows", "clipping"]), "--json"]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # of one rank alone
    assert {(one["engine"], one["holds"]) for one in told["cells"]} == {("none", True), ("ddp", True)}
    assert told["left_out"] == {"hsdp_window": "it needs 4 ranks, and there are 2"}


def test_the_table_has_a_mark_or_a_sentence_for_each_cell():
    report = Report(list(ROWS), dict.fromkeys(["ddp", "fsdp2"], Ranks(2)))
    for engine in report.engines:
        for row in ROWS:
            if CELLS[engine, row].why_not is None:
                report.tried[engine, row] = Tried([])
    report.tried["ddp", "reset"] = Tried([(0, "it hangs"), (1, "ValueError: at fault\nTraceback")])
    for form in (as_text, as_markdown):
        text = form(report, FACTS)
        assert "✗ DDP, reset: rank 1 (and 1 more): ValueError: at fault" in text and "Traceback" not in text
        assert "find_unused_parameters=True" in text and "do not hold" in text
        [line] = [line for line in text.splitlines() if "full windows" in line]
        assert line.count("✓") == 2


@pytest.mark.parametrize("arguments", [["--engine=nothing"], ["--ranks=0"], ["--limit=0"], ["--json", "--markdown"]])
def test_wrong_arguments_are_an_error(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m gradsync verify" in capsys.readouterr().err


def test_help_names_engines_and_promises(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*HOMES, *ROWS))
