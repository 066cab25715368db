"""torchrun restarts a job whose rank was killed, and it ends with the bits it would have had."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.programs import ENVIRONMENT, ROOT, Programs
from tests.support.ranks import PATIENCE

EXAMPLE = str(ROOT / "examples" / "resume.py")
NUM_KILLS = int(os.environ.get("GRADSYNC_KILLS", "8"))


def elastic(programs: Programs, jobs: list[list[str]], limit: float) -> list[dict]:
    """Run jobs one after another on torchrun's agent; a hang fails within `limit` seconds."""
    _, printed, complaints = programs.run("-m", "tests.faults.elastic", json.dumps(jobs), limit=limit)
    done = [json.loads(line) for line in printed.splitlines()]
    assert len(done) == len(jobs), f"job {len(done)} did not end: {jobs[len(done)]}\n{complaints[-3000:]}"
    return done


def parameters(job: dict) -> str:
    printed = "".join(text for name, text in job["output"].items() if name.endswith("stdout.log"))
    found = set(re.findall(r"parameters (\w{16})", printed))  # twice, if the kill came after the first
    assert job["error"] is None and len(found) == 1, f"{job['error']}\n{json.dumps(job['output'], indent=1)[-4000:]}"
    return found.pop()


def test_killed_at_random_points_a_job_ends_with_the_same_bits(programs, tmp_path):
    """Kills from a fixed seed: at any line of gradsync or of the example, or some moments after it, on any rank."""
    count = tmp_path / "lines"
    every = [[], ["--every", "3"]]
    calm = [
        [json.dumps({"count": f"{count}{i}"}), EXAMPLE, "--quick", "--folder", str(tmp_path / f"calm{i}"), *options]
        for i, options in enumerate(every)
    ]
    expected = {parameters(job) for job in elastic(programs, calm, 100)}
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
    done = elastic(programs, jobs, 400)
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
        "-m", "tests.faults.disturbed", fault, EXAMPLE, "--quick", "--folder", str(tmp_path),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        printed, complaints = process.communicate(timeout=90 * PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"HANG\n{process.communicate()}") from None
    assert process.returncode == 0, complaints
    assert "going on after" in printed, printed
    assert "Signal 9 (SIGKILL)" in complaints + printed or "exitcode: -9" in complaints, complaints
    assert len(re.findall(r"parameters \w{16}", printed)) == 1
