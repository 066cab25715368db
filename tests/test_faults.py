"""A rank that dies: the others say so in time, torchrun restarts the job, and it ends with the bits it would have had.

Nothing here is simulated: processes are killed or stopped, and every wait has an end.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gradsync.functional._lost import is_lost, lost
from tests.cases_faults import SLACK, TIMEOUT, Play, play

ROOT = Path(__file__).parents[1]
EXAMPLE = str(ROOT / "examples" / "resume.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
NUM_KILLS = 20

WINDOW_1 = r"Every rank must take part in synchronising the gradients of window 1 of train_step, but this one waited in vain"
LEFT = r"A rank has ended or hangs, .* Start the job again from its last checkpoint, as torchrun --max-restarts does"


def check(seen: dict[int, dict], text: str, cause: str = "RuntimeError") -> None:
    for rank, saw in seen.items():
        assert saw["kind"] == "GradSyncError" and re.search(text, saw["text"]), f"rank {rank}: {saw}"
        assert saw["cause"] == cause, f"rank {rank}: {saw}"
        assert saw["seconds"] < TIMEOUT + SLACK, f"rank {rank}: {saw}"
        assert saw["gradients"] == saw["index"] == 0, f"rank {rank} keeps half a window: {saw}"
        assert saw["exit code"] == 0, f"rank {rank}: {saw}"


# -- what the others see --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "size", "dying", "moment"),
    [
        ("bare", 2, 1, "between"), ("bare", 2, 0, "boundary"), ("bare", 3, 1, "backward"), ("ddp", 2, 1, "between"),
        ("ddp", 2, 0, "backward"), ("unused", 2, 1, "boundary"), ("unused", 3, 0, "backward"), ("static", 2, 1, "backward"),
    ],
)  # fmt: skip
def test_a_rank_that_is_killed_in_a_window(how, size, dying, moment):
    check(play("in_a_window", size, dying, how, moment), f"{WINDOW_1}: .*{LEFT}")


def test_a_rank_that_is_killed_as_a_window_opens():
    """Rank 0 is whose buffers the others get."""
    check(play("as_a_window_opens", 2, 0), r"making the buffers equal for window 1 of train_step, but this one waited")


def test_a_rank_that_nobody_sees_die():
    """It stands still, or dies before the ranks meet at the store: the process group's time-out ends the wait."""
    texts = {
        "in_a_window": WINDOW_1,
        "at_the_first_call": r"must come to the first use of a Sequential, but rank 1 did not",
        "at_the_first_boundary": r"must come to the first boundary of train_step, but rank 1 did not",
        "at_the_start_of_over": r"must come to the data of train_step.over, but rank 1 did not within the process group's",
        "before_it_hears_that_the_others_have_run_out": (
            r"must come to the first window of train_step.over that is not as planned on every rank, but rank 1 did not"
        ),
        "at_flush": r"must come to flush of train_step, but rank 1 did not",
    }
    cases = list(texts)
    for pair in zip(cases[::2], cases[1::2]):  # they do little but wait
        plays = [Play(case, 2, 1, *(["bare", "stands still"] if case == "in_a_window" else [])) for case in pair]
        for case, (saw,) in [(case, running.seen().values()) for case, running in zip(pair, plays)]:
            assert saw["kind"] == "GradSyncError" and re.search(texts[case], saw["text"]) and saw["exit code"] == 0, saw
            assert TIMEOUT / 2 < saw["seconds"] < TIMEOUT + SLACK, saw
            assert saw["index"] == (2 if case == "at_flush" else 0), "a flush that nobody took part in has changed nothing"


def test_a_rank_that_is_killed_after_the_others_have_run_out_of_data():
    check(play("after_the_others_have_run_out", 2, 1), WINDOW_1)


def test_a_rank_that_is_killed_in_sync_every():
    seen = play("in_sync_every", 2, 1)
    seen[0]["gradients"] = 0  # they are the user's there
    check(seen, r"synchronising the gradients of window 2 of sync_every")


def test_a_rank_that_is_killed_in_a_backward_of_the_users_own():
    """What it raises is torch's, as nobody can come between the two; what was waited for is a warning."""
    (saw,) = play("in_sync_every", 2, 1, True).values()
    assert saw["kind"] == "RuntimeError" and is_lost(RuntimeError(saw["text"])) and saw["seconds"] < TIMEOUT + SLACK, saw
    (text,) = saw["warned"]
    assert re.search(r"take part in synchronising the gradients of window 2 of sync_every, but .* error that follows", text)


def test_a_rank_that_is_killed_before_sync_gradients():
    check(play("in_sync_gradients", 2, 0), r"must take part in sync_gradients, but this one waited in vain")


@pytest.mark.parametrize("how", ["bare", "unused"])
def test_the_first_error_is_not_hidden_by_the_dead_rank(how):
    """A backward that fails on its own completes its collectives; that these fail as well is not what is told."""
    (saw,) = play("while_another_fails", 2, 1, how).values()
    assert (saw["kind"], saw["text"]) == ("ZeroDivisionError", "the user's own")
    assert saw["seconds"] < TIMEOUT + SLACK and saw["gradients"] == saw["index"] == 0


def test_an_error_in_the_body_stays_what_it_is():
    (saw,) = play("in_the_body", 2, 1).values()
    assert saw["kind"] == "RuntimeError" and saw["gradients"] == 0


@pytest.mark.parametrize(
    "text",
    [
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7042. "
        "This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting",
        "Application timeout caused pair closure",
        "[/__w/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete",
    ],
)
def test_the_words_of_a_lost_rank(text):
    """Seen from torch 2.13, and told without the place where torch was built."""
    assert is_lost(RuntimeError(text))
    said = str(lost(RuntimeError(text), "this"))
    assert "__w" not in said and "typically" not in said and said.startswith("Every rank must take part in this, but")


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("gloo"), lost(RuntimeError("gloo"), "")])
def test_other_errors_are_none_of_a_lost_rank(error):
    assert not is_lost(error)


# -- restarts -------------------------------------------------------------------------------------------------------


def elastic(jobs: list[list[str]], limit: float) -> list[dict]:
    """Run jobs one after another on torchrun's agent; a hang fails within `limit` seconds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.elastic", json.dumps(jobs)],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        printed, complaints = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, complaints = process.communicate()
        raise AssertionError(f"HANG: {len(printed.splitlines())} of {len(jobs)} jobs done\n{complaints[-3000:]}") from None
    done = [json.loads(line) for line in printed.splitlines()]
    assert len(done) == len(jobs), f"job {len(done)} did not end: {jobs[len(done)]}\n{complaints[-3000:]}"
    return done


def parameters(job: dict) -> str:
    printed = "".join(text for name, text in job["output"].items() if name.endswith("stdout.log"))
    found = set(re.findall(r"parameters (\w{16})", printed))  # twice, if the kill came after the first
    assert job["error"] is None and len(found) == 1, f"{job['error']}\n{json.dumps(job['output'], indent=1)[-4000:]}"
    return found.pop()


def test_killed_at_random_points_a_job_ends_with_the_same_bits(tmp_path):
    """Twenty kills, from a fixed seed: any line of gradsync or of the example, or some moments after it, on any rank."""
    count = tmp_path / "lines"
    every = [[], ["--every", "3"]]
    calm = [
        [json.dumps({"count": f"{count}{i}"}), EXAMPLE, "--quick", "--folder", str(tmp_path / f"calm{i}"), *options]
        for i, options in enumerate(every)
    ]
    expected = {parameters(job) for job in elastic(calm, 100)}
    assert len(expected) == 1
    generator = random.Random(5)
    jobs = []
    for number in range(NUM_KILLS):
        rank, mode = generator.randrange(2), number % 2
        lines = int(Path(f"{count}{mode}-{rank}").read_text())
        fault = {
            "rank": rank,
            "line": generator.randrange(1, int(0.98 * lines)),
            "delay": generator.choice([0, generator.uniform(0, 0.02)]),
            "timeout": 10,
        }
        jobs.append([json.dumps(fault), EXAMPLE, "--quick", "--folder", str(tmp_path / str(number)), *every[mode]])
    done = elastic(jobs, 400)
    killed = going_on = 0
    for job, (fault, *_) in zip(done, jobs):
        assert {parameters(job)} == expected, fault
        killed += any("attempt_1" in name for name in job["output"])
        going_on += any("going on after" in text for text in job["output"].values())
        complaints = "".join(text for name, text in job["output"].items() if name.endswith("stderr.log"))
        assert "terminate called" not in complaints, complaints
    print([round(job["seconds"], 1) for job in done])
    print(f"{killed} of {NUM_KILLS} were killed, {going_on} of them went on from a checkpoint")
    assert killed >= NUM_KILLS - 2 and going_on >= NUM_KILLS // 2


def test_torchrun_restarts_the_job(tmp_path):
    """The command itself; the time-out is the default of half an hour, and not waited for."""
    fault = json.dumps({"rank": 1, "line": 9000})
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
        "-m", "tests.disturbed", fault, EXAMPLE, "--quick", "--folder", str(tmp_path),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        printed, complaints = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"HANG\n{process.communicate()}") from None
    assert process.returncode == 0, complaints
    assert "going on after" in printed and "Signal 9 (SIGKILL)" in complaints + printed or "exitcode: -9" in complaints
    assert len(re.findall(r"parameters \w{16}", printed)) == 1
