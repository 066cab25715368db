"""Windows that are not as planned: every rank hears of the first in time, and until then nothing is sent.

How many collectives that saves is counted in test_ddp.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
CASES = "tests.uneven.notice_cases:"
WRAPS = ["bare", "ddp"]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("how", ["over", "sync_every"])
def test_loops_that_pass_over_items(ranks, wrap, how):
    ranks(2).run(CASES + "passing_over", wrap, how)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("how", ["over", "sync_every"])
@pytest.mark.parametrize(
    ("said", "true"), [([8, 8], [5, 8]), ([3, 8], [8, 8]), ([8, 6], [8, 9]), ([5, 5], [8, 8]), ([9, 9], [9, 1])]
)
def test_lengths_that_are_wrong(ranks, wrap, how, said, true):
    ranks(2).run(CASES + "wrong_lengths", wrap, how, said, true)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_rank_that_calls_twice_an_item(ranks, wrap):
    ranks(2).run(CASES + "calls_twice", wrap)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_loop_that_is_left_early(ranks, wrap):
    ranks(2).run(CASES + "left_early", wrap)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_rank_that_fails_as_another_gives_notice(ranks, wrap):
    assert ranks(2).run(CASES + "failing_as_another_gives_notice", wrap) == ["", "division by zero"]


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_kind_of_loss_that_changes_on_one_rank(ranks, wrap):
    for text in ranks(2).run(CASES + "kinds_that_change", wrap):
        assert text.startswith("after 1 updates") and "rank 0 returned a mean, rank 1 returned a LossSum" in text


@pytest.mark.parametrize("wrap", WRAPS)
def test_many_loops(ranks, wrap):
    ranks(2).run(CASES + "many_loops", wrap)


LATE = """
import threading, time, torch
import gradsync

@gradsync.accumulating(steps=2)
def train_step(model, optimizer, x):
    return model(x).sum()

with gradsync.process_group() as world:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    time.sleep(2.5 * world.rank)  # the other one waits at the store
    for i, x in enumerate(train_step.over(iter(torch.ones(6, 3, 2)))):
        if i == 3:
            time.sleep(1.5)  # and both have a listener
        train_step(model, optimizer, x)
    listening = [thread for thread in threading.enumerate() if thread.name == "gradsync: listener"]
    assert len(listening) == 1
assert not listening[0].is_alive()
print(train_step.progress.updates)
"""


def test_waiting_is_silent(tmp_path):
    """torch prints a warning for each wait at a TCPStore that ends in vain, and a job would have two a second."""
    (tmp_path / "late.py").write_text(LATE)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "late.py"],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.count("3"), done.stderr) == (0, 2, ""), done


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_store_that_cannot_be_copied(ranks, wrap):
    ranks(2).run(CASES + "a_store_of_ones_own", wrap)
