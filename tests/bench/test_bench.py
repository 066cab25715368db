"""`python -m gradsync bench`: its arithmetic, its answers, and that it ends, cleanly, whatever happens to it."""

import importlib.util
import inspect
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradsync.__main__
from gradsync.__main__ import main as command
from gradsync.bench import _hosts, _measure, _window_cost
from gradsync.bench._advice import advice
from gradsync.bench._cli import main
from gradsync.bench._measure import Lane, visit
from gradsync.bench._models import build
from gradsync.bench._plot import plot
from gradsync.bench._records import (
    Measured,
    Options,
    Place,
    Sample,
    dump_measured,
    dump_task,
    load_measured,
    load_task,
)
from gradsync.bench._remedies import REMEDIES
from gradsync.bench._report import report
from gradsync.bench._suggest import Longer, Suggestion
from gradsync.bench._summary import Summary, summarise
from gradsync.bench._task import Window
from gradsync.bench._ways import WAYS
from tests.support.programs import TORCHRUN, Program, Programs
from tests.support.ranks import PATIENCE

LIMIT = "--limit", str(60 * PATIENCE)
SHORT = "--rounds", "3", "--seconds", "1", *LIMIT
ENDLESS = "--width", "16", "--ways", "no_sync", "--rounds", "1000000", "--seconds", "1000", *LIMIT
ABLE = sys.platform.startswith("linux") and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
needs_two_hosts = pytest.mark.skipif(not ABLE, reason="two hosts on one machine need Linux, root and iproute2")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")


# The arithmetic.


def test_a_fit_finds_the_cost_that_made_the_times() -> None:
    """Times that follow c + s/N give back c and s."""
    for c, s in itertools.product((0.001, 0.06, 3.0), (0.0, 0.27, 40.0)):
        cost = _window_cost.least_squares({n: c + s / n for n in (1, 2, 4, 8, 16, 32)})
        assert cost == pytest.approx((c, s), rel=1e-9, abs=1e-9)
        assert cost.at(5) == pytest.approx(c + s / 5)


def test_a_fit_of_noisy_times_is_the_weighted_least_squares_line() -> None:
    """With noise, it is numpy's line through (1/N, seconds), each point weighed by 1/seconds."""
    numpy = pytest.importorskip("numpy")
    times = {1: 0.34, 2: 0.19, 4: 0.131, 8: 0.088, 32: 0.071}
    s, c = numpy.polyfit([1 / n for n in times], list(times.values()), 1, w=[1 / y for y in times.values()])
    assert _window_cost.least_squares(times) == pytest.approx((c, s))


def test_one_window_length_is_no_line() -> None:
    """There are two unknowns, c and s."""
    with pytest.raises(ValueError, match=r"needs times at two window lengths at least; they came at one\."):
        _window_cost.least_squares({4: 0.5})


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (0.27, 0.24 - 0.04 + 0.27),  # the last backward, 0.04, hides that much of the link's time
        (0.04, 0.24),  # or all of it
        (0.01, 0.24),  # but does not get shorter by it
        (0.00, 0.24),
    ],
)
def test_the_limit_computes_everything_and_sends_once(link: float, expected: float) -> None:
    """Four micro-batches of 0.06 s, of which 0.02 s are forward."""
    assert _window_cost.limit(compute=0.24, forward=0.02, link=link, steps=4) == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "times_the_bytes"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_an_all_reduce_sends_what_a_ring_sends(ranks: int, times_the_bytes: float) -> None:
    """Each rank passes on every chunk but one, twice."""
    assert _window_cost.num_link_bits(1000, ranks) == pytest.approx(8000 * times_the_bytes)


def test_enough_is_the_first_window_length_that_is_long_enough() -> None:
    """Counting up from 1 finds the same one."""
    for c, sync in itertools.product((0.0031, 0.061, 0.1), (0.0, 0.001, 0.1, 0.27, 2.0)):
        assert _window_cost.enough(sync, c) == next(n for n in itertools.count(1) if sync / (n * c + sync) < 0.1)


def test_noise_below_zero_is_no_share() -> None:
    """A synchronisation that seems to save time takes none."""
    assert _window_cost.share(-0.1, 0.9) == 0.0
    assert _window_cost.share(3.0, 4.0) == 0.75


@pytest.mark.parametrize(
    ("link", "expected"),
    [(0.0, 1), (0.059, 1), (0.061, 2), (0.12, 2), (0.27, 5), (0.47, 8), (9.0, 8)],
)
def test_as_many_micro_batches_overlap_as_hide_the_link(link: float, expected: float) -> None:
    """Of 0.06 s each, 8 in a window."""
    assert _window_cost.num_hiding(link, 0.06, 8) == expected


# From times to findings.

OPTIONS = Options("mlp", None, None, {"width": 16, "depth": 1}, 128, (4,), ("baseline", "no_sync", "compute"), 1, 5, 45.0, 60.0)
HOSTS = Place("several nodes", 2, 2, "1gbit", "gradsync0")
NODE = Place("single node", 1, 2)
SECONDS = {
    "baseline": [1.0, 1.2, 1.1, 1.4, 1.3],
    "no_sync": [0.5, 0.4, 0.55, 0.7, 0.5],
    "compute": [0.24, 0.24, 0.24, 0.44, 0.24],
    "forward": [0.02] * 5,
    "link": [0.27, 0.26, 0.28, 0.27, 0.27],
}


def measured(place: Place, samples: list[Sample], missing: dict[str, str] | None = None) -> Measured:
    """What a group of ranks answers."""
    return Measured(place, "2.13.0", "gloo", "cpu", 8_000_000, 32_000_000, "AdamW", missing or {}, samples)


def table(apart: tuple[str, ...] = (), missing: dict[str, str] | None = None) -> Summary:
    """Two rows of one window length."""
    sample = Sample(4, SECONDS, {"baseline": 134e6, "no_sync": 33.5e6, "compute": 100.0}, list(apart))
    groups = [measured(HOSTS, [sample], missing), measured(NODE, [replace(sample, sent={})])]
    return summarise(OPTIONS, "python -m gradsync bench", groups)


def sweep() -> Summary:
    """Exactly c + s/N: c is 60 ms; a window costs 290 ms once, of which 20 ms are the optimizer's."""
    samples = []
    for steps in (1, 4, 16):
        compute, window = 0.06 * steps + 0.02, 0.06 * steps + 0.29
        seconds = {"no_sync": [window] * 3, "compute": [compute] * 3, "forward": [0.02] * 3, "link": [0.27] * 3}
        samples.append(Sample(steps, seconds, {}, []))
    options = replace(OPTIONS, steps=(1, 4, 16), ways=("no_sync", "compute"))
    links = [replace(HOSTS, link=link) for link in ("100mbit", "1gbit")]
    return summarise(options, "python -m gradsync bench", [measured(place, samples) for place in links])


def test_columns_are_medians_and_quartiles_and_compared_by_their_medians() -> None:
    """Against values worked out by hand from the five rounds."""
    row = table().rows[0]
    baseline, no_sync = row.ways["baseline"], row.ways["no_sync"]
    assert (baseline.median, *baseline.quartiles) == pytest.approx((1.2, 1.1, 1.3))
    assert (no_sync.median, *no_sync.quartiles) == pytest.approx((0.5, 0.5, 0.55))
    assert baseline.ratio == pytest.approx(1.2 / 0.5)
    assert no_sync.ratio == 1.0
    # The last backward, 0.24 / 4 - 0.02, hides that much of the link's time.
    assert row.limit == pytest.approx(0.24 - 0.04 + 0.27)
    assert baseline.over_limit == pytest.approx(1.2 - 0.47)
    assert no_sync.over_compute == pytest.approx(0.5 - 0.24)
    assert row.link_seconds == pytest.approx(0.27)
    assert row.link_bits_per_second == pytest.approx(32e6 * 8 / 0.27)
    assert (baseline.bytes_sent, row.ways["compute"].synchronised) == (134e6, None)


def test_advice_says_what_longer_windows_do_to_the_batch() -> None:
    """0.26 s beyond 0.06 s a micro-batch: 0.26 / (N 0.06 + 0.26) falls under a tenth at 40."""
    advice = table().advice[0]
    assert advice.way == "no_sync"
    [share] = advice.shares
    assert share.share == pytest.approx(0.26 / 0.50)
    assert share.baseline == pytest.approx(0.96 / 1.2)
    assert (share.steps, share.effective_batch) == (4, 1024)
    assert advice.enough is not None and advice.enough.estimated
    assert (advice.enough.steps, advice.enough.effective_batch) == (40, 40 * 128 * 2)
    assert advice.enough.share == pytest.approx(0.26 / (40 * 0.06 + 0.26))


def test_a_sweep_fits_each_way() -> None:
    """The curves are those that made the times."""
    curves = {(curve.link, curve.way): (curve.micro_batch, curve.window) for curve in sweep().curves}
    assert curves["1gbit", "no_sync"] == pytest.approx((0.06, 0.29))
    assert curves["100mbit", "compute"] == pytest.approx((0.06, 0.02))


def windows(shares: dict[int, float], spread: float = 0.01) -> Suggestion:
    """The advice where windows of these lengths were measured to synchronise for these shares of their time."""
    samples = []
    for steps, share in shares.items():
        compute = 0.06 * steps
        seconds = {"no_sync": compute / (1 - share), "baseline": 2 * compute, "compute": compute}
        noisy = {name: [x * (1 - 2 * spread), x, x * (1 + 2 * spread)] for name, x in seconds.items()}
        samples.append(Sample(steps, {**noisy, "forward": [0.02] * 3, "link": [0.27] * 3}, {}, []))
    options = replace(OPTIONS, steps=tuple(shares))
    [suggestion] = summarise(options, "python -m gradsync bench", [measured(NODE, samples)]).advice
    return suggestion


def test_a_window_length_that_was_measured_is_judged_by_its_own_times() -> None:
    """Whatever the others' times, or a line through them, would say of it."""
    for noise in (0.02, 0.20, 0.45):
        found = windows({1: 0.30, 4: 0.06, 16: noise / 10})
        assert [share.share for share in found.shares] == pytest.approx([0.30, 0.06, noise / 10])
        assert found.enough == Longer(4, pytest.approx(0.06), 4 * 128 * 2, estimated=False)
    text = advice(windows({1: 0.30, 4: 0.06, 16: 0.0}))
    assert "30% of the time in windows of 1: 0.086 s, of which 0.060 are computing" in text
    assert "0% of the time in windows of 16: 0.960 s is no more than the 0.960 of computing alone" in text
    assert "Of the windows measured, those of 4 are the shortest under 10% (effective batch 1024)." in text


def test_no_advice_names_a_shorter_window_than_those_that_were_measured() -> None:
    """Noise has hidden the synchronisation: of windows of 1 this run knows nothing."""
    found = windows({4: 0.0})
    assert found.enough == Longer(4, 0.0, 1024, estimated=False)
    assert "That is under 10% in windows of 4 (effective batch 1024)." in advice(found)
    assert "windows of 1" not in advice(found)


def test_an_estimate_is_longer_than_all_that_was_measured() -> None:
    """However little is missing at the longest."""
    for share in (0.1001, 0.101, 0.13, 0.5, 0.95):
        enough = windows({1: 0.96, 8: share}).enough
        assert enough is not None and enough.estimated
        assert enough.steps > 8
        assert enough.share < 0.1


def test_shares_that_rise_with_the_window_are_called_noise() -> None:
    """Windows of 4 cannot be enough where those of 8 are not."""
    found = windows({1: 0.3, 4: 0.05, 8: 0.15})
    assert found.enough is None
    assert "noise, so this run cannot tell how long windows should be" in advice(found)


def test_a_share_whose_quartiles_lie_on_both_sides_is_told() -> None:
    """5% may as well be 14%."""
    text = advice(windows({4: 0.05}, spread=0.05))
    assert "In windows of 4 the quartiles lie on both sides of 10%: measure for longer" in text
    assert "both sides" not in advice(windows({4: 0.05}, spread=0.001))


def test_windows_of_1_synchronise_in_every_backward_anyway() -> None:
    """A second number for the same thing would only differ by noise."""
    assert [share.baseline for share in windows({1: 0.5, 2: 0.3}).shares] == [None, pytest.approx(0.5)]


# Remedies.


def remedies(overlap: float, bf16: float, both: float, apart: tuple[str, ...] = (), spread: float = 0.01) -> Suggestion:
    """The advice where the remedies took these seconds, windows of 4 took 0.55 by the decorator, and 0.30 computing."""
    times = {"no_sync": 0.55, "accumulating": 0.55, "overlap": overlap, "bf16": bf16, "both": both, "compute": 0.30}
    noisy = {name: [x * (1 - 2 * spread), x, x * (1 + 2 * spread)] for name, x in times.items()}
    sample = Sample(4, {**noisy, "forward": [0.02] * 3, "link": [0.27] * 3}, {}, list(apart), {"overlap": 4, "both": 1})
    [suggestion] = summarise(OPTIONS, "python -m gradsync bench", [measured(HOSTS, [sample])]).advice
    return suggestion


def test_the_best_remedy_is_written_out_with_its_gain_and_its_price() -> None:
    """As a line to copy; the numbers are those of the prototype in a recorded run."""
    found = remedies(overlap=0.37, bf16=0.45, both=0.33)
    [gain] = found.gains
    assert (gain.way, gain.steps, gain.seconds, gain.instead_of) == ("both", 4, 0.33, 0.55)
    assert gain.ratio == pytest.approx(0.6)
    sentence = (
        'Write `@gradsync.accumulating(steps=4, overlap=1, compress="bf16")`: an optimizer step here then takes '
        "0.330 s, 0.60 of the 0.550 of `accumulating`, and the first micro-batch of a window is computed on provisional "
        "parameters, and gradients are added up in bfloat16."
    )
    assert advice(found).splitlines()[-1] == sentence


def test_of_remedies_that_are_as_fast_the_simplest_is_advised() -> None:
    """Rounding to bfloat16 for a gain of 1% is no good trade."""
    found = remedies(overlap=0.37, bf16=0.45, both=0.366)
    assert [gain.way for gain in found.gains] == ["overlap"]
    assert "Write `@gradsync.accumulating(steps=4, overlap=4)`" in advice(found)
    assert "the first 4 micro-batches of a window are computed on provisional parameters." in advice(found)


NOTHING_GAINED = "No remedy is worth its price in windows of 4: the best, `@gradsync.accumulating(steps=4, overlap=4)`"
NOTHING_CLEAR = "in windows of 4, this run cannot tell: `@gradsync.accumulating(steps=4, overlap=4)` takes"


@pytest.mark.parametrize(
    ("seconds", "spread", "told"), [(0.60, 0.01, NOTHING_GAINED), (0.54, 0.001, NOTHING_GAINED), (0.50, 0.1, NOTHING_CLEAR)]
)
def test_a_remedy_that_gains_nothing_clear_is_not_advised(seconds: float, spread: float, told: str) -> None:
    """It is slower, or a few percent faster, or its quartiles reach into the other's."""
    text = advice(remedies(overlap=seconds, bf16=seconds * 1.1, both=seconds * 1.1, spread=spread))
    assert "Write `" not in text
    assert told in text


def test_a_remedy_that_did_not_synchronise_is_not_advised() -> None:
    """It is fast for nothing."""
    assert [gain.way for gain in remedies(0.37, 0.45, 0.20, apart=("both",)).gains] == ["overlap"]
    assert remedies(0.37, 0.45, 0.20, apart=("both", "overlap", "bf16")).gains == []


def test_remedies_wait_for_the_keywords_that_they_need() -> None:
    """Each is left out as long as the decorator lacks one of its own, and names that."""

    def today(steps: int, *, model: object = None) -> None: ...

    def overlapping(steps: int, *, overlap: int = 0) -> None: ...

    def everything(steps: int, *, overlap: int = 0, compress: str | None = None) -> None: ...

    lacking = {name: [remedy.lacking(f) for f in (today, overlapping, everything)] for name, remedy in REMEDIES.items()}
    assert lacking == {
        "overlap": [["overlap"], [], []],
        "bf16": [["compress"], ["compress"], []],
        "both": [["overlap", "compress"], ["compress"], []],
    }


def visited() -> list[str]:
    """What a visit to a way that overlaps does, with each look at the clock, and one to a way that does not."""
    done: list[str] = []
    clock = SimpleNamespace(perf_counter=lambda: (done.append("clock"), 0.0)[1])
    _measure.time, before = clock, _measure.time
    try:
        visit(Lane(Window(lambda: done.append("run"), lambda: done.append("settle")), 3), torch.device("cpu"), None)
        visit(Lane(Window(lambda: done.append("plain")), 2), torch.device("cpu"), None)
    finally:
        _measure.time = before
    return done


def test_as_many_gradients_land_under_the_clock_as_leave(ranks) -> None:
    """Two windows go ahead of the clock, so that it starts behind a landing; what the last one sent is waited for after it."""
    for done in ranks(2).run(visited):
        assert done == ["run", "run", "clock", *["run"] * 3, "clock", "settle", "clock", *["plain"] * 2, "clock"]


def test_the_json_has_a_fixed_shape() -> None:
    """Scripts read these names."""
    record = json.loads(json.dumps(asdict(table())))
    assert set(record) == {
        *("command", "model", "sizes", "parameters", "gradient_bytes", "batch", "threads", "torch", "backend"),
        *("device", "optimizer", "missing", "rows", "curves", "advice"),
    }
    row = record["rows"][0]
    assert set(row) == {
        *("place", "link", "hosts", "ranks", "steps", "rounds", "forward", "link_seconds", "link_bits_per_second"),
        *("limit", "overlap", "ways"),
    }
    assert set(row["ways"]["no_sync"]) == {
        *("seconds", "median", "quartiles", "ratio", "over_limit", "over_compute", "bytes_sent", "synchronised"),
    }
    advised = record["advice"][0]
    assert set(advised) == {"place", "link", "way", "shares", "enough", "gains"}
    assert set(advised["shares"][0]) == {
        *("steps", "seconds", "compute", "share", "quartiles", "baseline", "effective_batch"),
    }
    assert set(advised["enough"]) == {"steps", "share", "effective_batch", "estimated"}
    gain = asdict(remedies(0.37, 0.45, 0.33))["gains"][0]
    assert set(gain) == {"steps", "way", "written", "price", "seconds", "instead_of", "ratio", "clear"}
    curve = json.loads(json.dumps(asdict(sweep())))["curves"][0]
    assert set(curve) == {"place", "link", "way", "micro_batch", "window"}


def test_ranks_and_bench_understand_each_other() -> None:
    """What is told and answered arrives as it was."""
    assert load_task(dump_task(OPTIONS, HOSTS)) == (OPTIONS, HOSTS)
    answer = measured(HOSTS, [Sample(4, SECONDS, {}, ["fabric"], {"both": 2})], {"fabric": "not installed"})
    assert load_measured(dump_measured(answer)) == answer


def test_the_report_is_a_table_with_its_limit_and_advice() -> None:
    """A row a place, a column a way, and sentences."""
    text = report(table())
    lines = text.splitlines()
    assert "s per optimizer step, accumulation 4, medians" in text
    assert next(line for line in lines if line.startswith("several nodes, 1gbit ")).split()[3:] == [
        *("1.200", "0.500", "0.240", "0.470")
    ]
    assert "0.948 Gbit/s from each rank" in text
    assert "in `no_sync`, synchronisation takes 52% of the time in windows of 4: 0.500 s, of which 0.240 are comput" in text
    assert "80% where every backward synchronises)." in text
    assert "Windows of about 40 would bring it under 10%, if a window still costs 0.260 s beyond computing there" in text
    assert "from 1024 to 10240" in text
    assert "batch 128; AdamW" in text
    assert "c + s/N" in report(sweep())


def test_the_report_names_what_is_missing_and_what_did_not_synchronise() -> None:
    """A way that leaves the ranks apart is fast for nothing."""
    text = report(table(apart=("no_sync",), missing=dict.fromkeys(("overlap", "both"), "`accumulating` has no `overlap`")))
    assert "several nodes, 1gbit, 4 steps: no_sync left the ranks with DIFFERENT parameters." in text
    assert "Left out: overlap, overlap and bf16; `accumulating` has no `overlap`." in text
    assert "DIFFERENT" not in report(table())


def every_way() -> Summary:
    """All columns."""
    sample = Sample(4, {**dict.fromkeys((*WAYS, "forward", "link"), [0.5, 0.4, 0.6])}, {}, [], {"overlap": 4, "both": 2})
    return summarise(OPTIONS, "python -m gradsync bench", [measured(HOSTS, [sample]), measured(NODE, [sample])])


def test_what_is_printed_can_be_worked_out_from_what_is_printed() -> None:
    """Each ratio is that of the two medians beside it."""
    row = table().rows[0]
    for line in report(table()).splitlines():
        name = next((name for name in ("baseline", "no_sync") if line.startswith(f"{name} ")), None)
        if name is not None and len(line.split()) > 6:
            _, seconds, _, _, _, ratio, over, percent, *_ = line.split()
            assert float(ratio) == pytest.approx(float(seconds) / 0.500, abs=0.005)
            assert float(over) == pytest.approx(float(seconds) - round(row.limit, 3), abs=0.0005)
            assert float(percent.strip("(+%)")) == pytest.approx(100 * float(over) / 0.470, abs=0.5)


@pytest.mark.parametrize("summary", [table(), sweep(), every_way()], ids=["bars", "curves", "every way"])
def test_a_picture_can_be_drawn_of_everything(summary: Summary, tmp_path: Path) -> None:
    """Bars or curves, a panel a place, from zero, with labelled axes."""
    pytest.importorskip("matplotlib")
    figure = plot(summary, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert len(figure.axes) == 2
    for axes in figure.axes:
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylabel()
        assert axes.get_title()


# Arguments.


def test_an_unknown_command_is_told_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Those whose module is there; exit code 2."""
    there = ["bench", *(["verify"] if importlib.util.find_spec("gradsync.verify") else [])]
    assert command(["benhc"]) == 2
    said = capsys.readouterr().err
    assert f"gradsync: There is no command 'benhc'. The commands are {' and '.join(there)}; " in said
    assert command([]) == 2
    assert command(["--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:] if line]
    assert listed == there


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "4,0"], "argument --steps: it must be a whole number of at least 1; it came as '0'"),
        (["--rounds", "2"], "argument --rounds: it must be a whole number of at least 3; it came as '2'"),
        (["--limit", "soon"], "argument --limit: it must be a number of seconds above 0; it came as 'soon'"),
        (["--ways", "fast"], "argument --ways: there is no way named 'fast'; there are baseline, improperly, no_sync,"),
        (["--ranks", "1"], "Synchronisation needs two ranks at least; --ranks came as 1."),
        (["--link", "1gbit"], "--link and --links give emulated hosts their rate; they need --hosts 2."),
        (["--hosts", "2", "--link", "1gbit", "--links", "1gbit"], "--link gives one rate and --links several;"),
        (["--hosts", "2", "--link", "fast"], "written as 100mbit or 2.5gbit (kbit, mbit, gbit); it came as 'fast'."),
        (["--heads", "2"], "--heads is no size of this model: mlp has batch, width, depth."),
        (["--model", "gpt", "--heads", "3"], "--width must be a multiple of --heads; they came as 256 and 3."),
        (["--model", "gpt", "--factory", "a:b"], "--factory brings its own model, so --model has no meaning beside it"),
        (["--factory", "json"], "--factory needs module:function; it came as 'json'."),
        (["--factory", "nowhere:f"], "--factory nowhere:f: there is no module nowhere; it must be importable from"),
        (["--factory", "nowhere.at_all:f"], "--factory nowhere.at_all:f: there is no module nowhere.at_all;"),
        (["--factory", "json:dumps", "--width", "3"], "of this model: a factory sets its model's sizes itself."),
        (["--plot", "/nowhere/a.png"], "--plot /nowhere/a.png: there is no folder /nowhere."),
    ],
)
def test_wrong_arguments_are_told_what_to_do(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started, with exit code 2."""
    assert text in refusal(arguments, capsys)


@pytest.mark.parametrize(
    ("package", "arguments", "text"),
    [
        ("matplotlib", ["--plot", "a.png"], "--plot needs matplotlib, which is not installed here: `pip install"),
        ("transformers", ["--model", "bert"], "--model bert needs the package transformers, which is not installed"),
    ],
)
def test_a_missing_package_is_told_before_measuring(
    package: str,
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A minute of measuring is not wasted on a picture that cannot be drawn."""
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else find(name))
    assert text in refusal(arguments, capsys)


@pytest.mark.parametrize(
    ("target", "value", "text"),
    [
        ("sys.platform", "darwin", "--hosts needs Linux's network namespaces; this is darwin."),
        ("shutil.which", lambda _: None, "--hosts needs ip and tc of iproute2, which this machine does not have"),
        ("os.geteuid", lambda: 1000, "--hosts makes network namespaces, which needs root; start the bench with sudo."),
    ],
)
def test_two_hosts_say_what_they_need(
    target: str, value: object, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Linux, iproute2, root: asked for in this order."""
    for name, fine in (("sys.platform", "linux"), ("shutil.which", str), ("os.geteuid", lambda: 0)):
        monkeypatch.setattr(name, fine)
    monkeypatch.setattr(target, value)
    assert text in refusal(["--hosts", "2"], capsys)


def test_torchrun_has_decided_where(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Under it, no hosts or ranks can be asked for."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = "--hosts is for a bench that starts its own ranks; torchrun has started these. Leave it out."
    assert text in refusal(["--hosts", "2"], capsys)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a run that is refused says, on one line."""
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    return " ".join(capsys.readouterr().err.split())


# Real runs.

FACTORY = """
import os, time, torch

RANK = int(os.environ["RANK"])


def build(batch_size, device, compute_loss=lambda model, batch: model(batch).square().mean()):
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.Adam(model.parameters()), lambda: torch.randn(batch_size, 8), compute_loss


def bypassed(batch_size, device):
    return build(batch_size, device, lambda model, batch: getattr(model, "module", model)(batch).square().mean())


def failing(batch_size, device):
    def compute_loss(model, batch):
        if RANK == 1:
            raise LookupError("this sample is damaged")
        return model(batch).mean()
    return build(batch_size, device, compute_loss)


def stuck(batch_size, device):
    def compute_loss(model, batch):
        time.sleep(1000 * RANK)
        return model(batch).mean()
    return build(batch_size, device, compute_loss)

"""


def prepared(tmp_path: Path) -> dict[str, str]:
    """The environment of a bench whose temporary files, and factories, are in that folder."""
    (tmp_path / "ours.py").write_text(FACTORY)
    return {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}


@contextmanager
def bench(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A bench at work; its ranks' command lines name `tmp_path`."""
    with subprocess.Popen(
        [sys.executable, "-m", "gradsync", "bench", *arguments],
        cwd=tmp_path,
        env={**os.environ, **prepared(tmp_path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def begun(programs: Programs, tmp_path: Path, *arguments: str, command: tuple[str, ...] = ("-m", "gradsync")) -> Program:
    """A bench of which only the end matters."""
    return programs.start(*command, "bench", *arguments, limit=150, cwd=tmp_path, environment=prepared(tmp_path))


@pytest.fixture(scope="module")
def hanging(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A rank that hangs, begun before the other real runs: it does nothing but wait for its limit."""
    tmp_path = tmp_path_factory.mktemp("hanging")
    limit = str(10 * PATIENCE)
    return begun(programs, tmp_path, "--factory", "ours:stuck", "--ways", "no_sync", "--limit", limit)


def ranks_alive(tmp_path: Path) -> list[int]:
    """The processes whose command line is that of a rank under `tmp_path`."""
    alive = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"gradsync.bench._rank" in words and any(word.startswith(os.fsencode(tmp_path)) for word in words):
            alive.append(int(line.parent.name))
    return alive


def namespaces(process: "subprocess.Popen[str] | None" = None) -> list[str]:
    """The hosts of one bench, or those of this process."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    pid = process.pid if process else os.getpid()
    return [line for line in listed.splitlines() if line.startswith(f"gradsync-{pid}-")]


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Fail if it does not come true."""
    deadline = time.monotonic() + seconds * PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_two_local_ranks_measure_every_way(programs: Programs, hanging: Program, tmp_path: Path) -> None:
    """The default ways on a factory's model: all synchronise; a table, a file and a picture tell of them."""
    pytest.importorskip("matplotlib")
    arguments = "--factory", "ours:build", *SHORT, "--json", "a.json", "--plot", "a.png"
    code, output, errors = begun(programs, tmp_path, *arguments).ended()
    assert code == 0, errors
    assert output.startswith("ours:build: 0.0M parameters")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["gradient_bytes"] == (8 * 8 + 8) * 4
    [row] = record["rows"]
    assert (row["place"], row["ranks"], row["steps"], row["rounds"]) == ("single node", 2, 4, 3)
    assert {"baseline", "improperly", "no_sync", "accumulating", "sync_every", "compute"} <= set(row["ways"])
    assert set(row["ways"]) | set(record["missing"]) >= {"accelerate", "fabric", "overlap", "bf16", "both"}
    keywords = inspect.signature(gradsync.accumulating).parameters
    assert ("overlap" in row["ways"]) is ("overlap" in keywords)
    assert ("bf16" in row["ways"]) is ("compress" in keywords)
    for name in {"overlap", "both"} & set(row["ways"]):
        assert 1 <= row["overlap"][name] <= 4
    for name, column in row["ways"].items():
        assert len(column["seconds"]) == 3
        assert min(column["seconds"]) > 0
        assert column["synchronised"] is (None if name == "compute" else True), name


@needs_two_hosts
def test_two_emulated_hosts_send_what_each_way_must(programs: Programs, tmp_path: Path) -> None:
    """The link's own count: the gradients once a window, or once a micro-batch where that is what the way does."""
    code, output, errors = begun(
        programs,
        tmp_path,
        *("--hosts", "2", "--link", "1gbit", "--width", "256", "--batch", "2", *SHORT, "--json", "-"),
        *("--ways", "baseline,improperly,no_sync,accumulating,sync_every,compute"),
    ).ended()
    assert code == 0, errors
    record = json.loads(output)
    hosts, node = record["rows"]
    assert (hosts["place"], hosts["link"], hosts["hosts"]) == ("several nodes", "1gbit", 2)
    assert (node["place"], node["link"], node["hosts"]) == ("single node", None, 1)
    sent = {name: column["bytes_sent"] / record["gradient_bytes"] for name, column in hosts["ways"].items()}
    overhead = 0.1  # of TCP, and of gloo's own messages
    for name, times in {"baseline": 4, "improperly": 4, "no_sync": 1, "accumulating": 1, "sync_every": 1}.items():
        assert times <= sent[name] < times + 4 * overhead, name
    assert sent["compute"] < overhead
    assert all(column["bytes_sent"] is None for column in node["ways"].values())


def test_torchruns_ranks_measure_too_and_a_bypassed_wrapper_is_told(programs: Programs, tmp_path: Path) -> None:
    """One table from two ranks; it says that DDP never saw the forward of `model.module(x)`."""
    command = *TORCHRUN, inspect.getsourcefile(gradsync.__main__)
    arguments = "--factory", "ours:bypassed", "--ways", "no_sync", *SHORT
    code, output, errors = begun(programs, tmp_path, *arguments, command=command).ended()
    assert code == 0, errors
    assert output.count("per optimizer step") == 1
    assert "single node, 4 steps: no_sync left the ranks with DIFFERENT parameters." in output


def test_a_rank_that_fails_is_named_with_its_last_lines(programs: Programs, tmp_path: Path) -> None:
    """Not the rank that fails of it, and no hang."""
    code, _, errors = begun(programs, tmp_path, "--factory", "ours:failing", "--ways", "no_sync", *LIMIT).ended()
    assert code == 1
    assert "The bench could not go on: rank 1 ended with exit code 1. Its last lines:" in errors
    assert "LookupError: this sample is damaged" in errors


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("json:nothing", "must name a function; what json holds by that name is None."),
        ("string:digits", "must name a function; what string holds by that name is '0123456789'."),
        ("builtins:print", "must return (model, optimizer or None, make_batch, compute_loss); it returned NoneType."),
    ],
)
def test_a_factory_that_is_none_is_told(factory: str, text: str) -> None:
    """By the ranks: only they import it."""
    with pytest.raises(_hosts.BenchError, match=re.escape(text)):
        build(replace(OPTIONS, factory=factory), torch.device("cpu"))


def test_the_optimizer_is_the_one_that_was_asked_for() -> None:
    """Unless a factory brings its own, which it then has to be asked for in the factory."""
    cpu = torch.device("cpu")
    named = {name: type(build(replace(OPTIONS, optimizer=name), cpu).optimizer).__name__ for name in ("sgd", "adamw")}
    assert named == {"sgd": "SGD", "adamw": "AdamW"}
    assert type(build(OPTIONS, cpu).optimizer) is torch.optim.SGD
    own = replace(OPTIONS, factory="tests.bench.test_bench:with_adam")
    assert type(build(own, cpu).optimizer) is torch.optim.Adam
    with pytest.raises(_hosts.BenchError, match="brings its own optimizer, Adam, so --optimizer has no meaning beside it"):
        build(replace(own, optimizer="adamw"), cpu)


def with_adam(batch_size: int, device: torch.device) -> tuple[Any, ...]:
    """A factory."""
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.Adam(model.parameters()), lambda: torch.ones(2), lambda model, batch: model(batch).sum()


def test_ranks_that_hang_say_where_and_end(hanging: Program) -> None:
    """At --limit, with the line that they stand at."""
    code, _, errors = hanging.ended()
    assert code == 1
    assert "rank 1 had not ended at its --limit. It stood at:" in errors
    assert 'ours.py", line' in errors


@needs_two_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """No namespaces, no ranks, no files; and the shell's exit code for it."""
    with bench(tmp_path, *ENDLESS, "--hosts", "2") as process:
        wait_until(lambda: len(ranks_alive(tmp_path)) == 2)
        assert len(namespaces(process)) == 2
        process.send_signal(number)
        process.send_signal(number)  # an impatient user's second one changes nothing
        process.wait(timeout=30 * PATIENCE)
        assert process.returncode == 128 + number
        assert namespaces(process) == []
        assert ranks_alive(tmp_path) == []
        assert [path.name for path in tmp_path.iterdir()] == ["ours.py"]


@needs_two_hosts
def test_a_host_that_dies_ends_the_bench(tmp_path: Path) -> None:
    """The other one does not wait for it; what was made is taken away."""
    with bench(tmp_path, *ENDLESS, "--hosts", "2") as process:
        wait_until(lambda: len(ranks_alive(tmp_path)) == 2)
        os.kill(max(ranks_alive(tmp_path)), signal.SIGKILL)
        _, errors = process.communicate(timeout=60 * PATIENCE)
        assert process.returncode == 1
        assert "rank 1 was ended by SIGKILL. Its last lines:" in errors
        assert namespaces(process) == []
        assert ranks_alive(tmp_path) == []


@linux
def test_ranks_end_with_a_bench_that_was_killed(tmp_path: Path) -> None:
    """SIGKILL leaves it no time to end them, so they notice by themselves."""
    with bench(tmp_path, *ENDLESS) as process:
        wait_until(lambda: len(ranks_alive(tmp_path)) == 2)
        process.kill()
        process.wait(timeout=30 * PATIENCE)
        wait_until(lambda: ranks_alive(tmp_path) == [])


@needs_two_hosts
def test_hosts_are_gone_after_an_error() -> None:
    """And are there before it."""
    with suppress(LookupError), _hosts.two_hosts("100mbit"):
        assert len(namespaces()) == 2
        raise LookupError
    assert namespaces() == []


@needs_two_hosts
def test_hosts_that_cannot_be_finished_are_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails on the way says what the system answered."""
    monkeypatch.setattr(_hosts, "ADDRESSES", ("10.77.0.1", "nonsense"))
    with pytest.raises(_hosts.BenchError, match="nonsense"), _hosts.two_hosts("100mbit"):
        pass
    assert namespaces() == []


@pytest.mark.parametrize(("link", "bits"), [("1gbit", 1e9), ("2.5mbit", 2.5e6), ("64kbit", 64e3)])
def test_a_links_rate_is_read_as_tc_reads_it(link: str, bits: float) -> None:
    """In powers of ten."""
    assert _hosts.rate(link) == bits
