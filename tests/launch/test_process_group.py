"""`process_group`: what it takes, what it gives, how it ends."""

from __future__ import annotations

import gc
import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

import gradsync
from gradsync.ranks.group import timeout_of
from tests.device import job
from tests.launch import jobs
from tests.support.ranks import PATIENCE

# -- a call ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", ["30s", True, [30]])
def test_a_timeout_is_a_number_of_seconds_or_a_timedelta(timeout):
    with pytest.raises(TypeError, match=r"takes a number of seconds or a datetime\.timedelta, but got .*, of type \w+\."):
        gradsync.process_group(timeout=timeout)


@pytest.mark.parametrize("timeout", [0, -1.5, float("nan"), float("inf"), timedelta(0)])
def test_a_timeout_is_positive_and_finite(timeout):
    with pytest.raises(ValueError, match=r"takes a positive, finite time, but got .*Leave it out"):
        gradsync.process_group(timeout=timeout)


def test_a_backend_is_a_name():
    with pytest.raises(TypeError, match=r"takes the name of a backend, such as \"gloo\", but got 3, of type int\."):
        gradsync.process_group(3)


def test_a_call_that_is_not_entered_is_a_warning():
    with pytest.warns(RuntimeWarning, match=r"was called and not entered.*Use it as `with gradsync\.process_group\(\) as world:`"):
        gradsync.process_group()
        gc.collect()


def test_a_rank_that_is_asked_of_the_call_itself_is_an_error():
    call = gradsync.process_group()
    for name in ("rank", "world_size", "local_rank", "device"):
        with pytest.raises(gradsync.GradSyncError, match=rf"has no {name} before it is entered. Use it as `with"):
            getattr(call, name)
    with pytest.raises(AttributeError, match=r"no attribute 'barrier'. Use it as `with"):
        call.barrier()
    with call as world, pytest.raises(gradsync.GradSyncError, match="Use it as"):
        assert world.rank == call.rank


def test_under_a_plain_python_there_is_nothing_to_do():
    with gradsync.process_group(timeout=timedelta(minutes=1)) as world:
        assert (world.rank, world.world_size, world.local_rank, world.device.type) == (0, 1, 0, "cpu")
        assert not dist.is_initialized()


# -- ranks ----------------------------------------------------------------------------------------------------------


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return str(one.getsockname()[1])


def meeting() -> dict[str, str]:
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}


def programs(name: str, limit: float = 60.0) -> list[subprocess.CompletedProcess]:
    """A program of `jobs` on two ranks, as torchrun would start them."""
    told = {**os.environ, **meeting(), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.launch.jobs", name]
    running = [
        subprocess.Popen(
            command, env={**told, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for r in range(2)
    ]  # fmt: skip
    try:
        texts = [one.communicate(timeout=limit * PATIENCE) for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
    return [subprocess.CompletedProcess(command, one.returncode, *text) for one, text in zip(running, texts, strict=True)]


def test_on_the_cpu_the_ranks_meet_by_gloo_and_part():
    for rank, done in enumerate(programs("place")):
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f"{rank} 2 {rank} cpu gloo True",
            "DistributedDataParallel None True",
            "timeout 77.5",
            "initialised afterwards: False",
        ]


def test_on_a_device_the_backend_is_the_device_s_own_and_ddp_has_its_number():
    """One device is to be seen by each of two ranks: each takes it, whatever its number on the host."""
    for rank, done in enumerate(job(jobs.place, joined=False, **meeting())):
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f"{rank} 2 {rank} cuda:0 likenccl True",
            "DistributedDataParallel [0] True",
            "timeout 77.5",
            "initialised afterwards: False",
        ]


def test_a_backend_that_tells_no_timeout_has_torch_s_own():
    """One of somebody else's, which has no options."""
    group = SimpleNamespace(_device_types=[torch.device("cpu")], _get_backend=lambda device: object())
    assert timeout_of(group) == default_pg_timeout.total_seconds()


# -- a rank that leaves -----------------------------------------------------------------------------------------------

LEAVES = "rank 1 of 2 leaves gradsync.process_group() with an exception and aborts its process group:"


def test_on_a_device_a_rank_that_raises_says_so_first_and_waits_for_nobody():
    """The group's usual end waits there for all ranks, and one of them waits for this one."""
    waiting, raising = job(jobs.raises, joined=False, **meeting())
    assert raising.returncode == 1, raising.stderr
    first, second = (match.start() for match in re.finditer("ValueError: on purpose", raising.stderr))
    assert raising.stderr.index(LEAVES) < first < second, raising.stderr  # ours at once, and Python's own
    assert "in raises" in raising.stderr[:first]
    assert waiting.returncode == 1 and waiting.stdout.strip() == "released", waiting.stderr


def test_on_gloo_a_rank_that_raises_ends_as_any_program_does():
    waiting, raising = programs("raises")
    assert raising.returncode == 1 and raising.stderr.count("ValueError: on purpose") == 1, raising.stderr
    assert "aborts its process group" not in raising.stderr
    assert waiting.returncode == 1 and waiting.stdout.strip() == "released", waiting.stderr


def test_on_a_device_a_wait_for_a_lost_rank_ends_before_the_group_s_timeout_and_says_what_was_waited_for():
    """nccl's watchdog would end the process then, and Python could say nothing."""
    for done in job(jobs.waits_for_a_lost_rank, joined=False, **meeting()):
        assert done.returncode == 1, done.stderr
        assert re.search(
            r"GradSyncError: Every rank must take part in synchronising the gradients of window 1 of train_step, but this "
            r"one waited in vain: after [45] s the device had not brought the other ranks' table",
            done.stderr,
        ), done.stderr
        assert "leaves gradsync.process_group() with an exception" in done.stderr
