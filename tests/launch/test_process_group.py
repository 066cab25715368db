"""`process_group`: what it takes, what it gives, how it ends."""

from __future__ import annotations

import gc
import re
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

import gradsync
from tests.device import need_device, start

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


def job(*arguments: str, device: str = "", ranks: int = 2, limit: float = 60.0):
    """A program of `jobs` on some ranks, on the fake device if `device` says so."""
    if device:
        need_device()
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "FAKE_DEVICE": device}
    return start([["-m", "tests.launch.jobs", *arguments]] * ranks, limit=limit, **environment)


def test_on_the_cpu_the_ranks_meet_by_gloo_and_part():
    for rank, done in enumerate(job("place")):
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"{rank} 2 {rank} cpu gloo True", "initialised afterwards: False"]


def test_on_a_device_the_backend_is_the_device_s_own():
    """One device is to be seen by each of two ranks: each takes it, whatever its number on the host."""
    for rank, done in enumerate(job("place", device="yes")):
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"{rank} 2 {rank} cuda:0 likenccl True", "initialised afterwards: False"]


def test_ddp_on_a_device_has_its_number():
    for done in job("wrapped", device="yes"):
        assert (done.returncode, done.stdout.strip()) == (0, "DistributedDataParallel [0] True"), done.stderr


def test_the_timeout_is_the_group_s():
    for rank, done in enumerate(job("own_group", "77.5")):
        assert done.stdout.strip() == f"timeout 77.5 {rank}", done.stderr


# -- a rank that leaves -----------------------------------------------------------------------------------------------

LEAVES = "rank 1 of 2 leaves gradsync.process_group() with an exception and aborts its process group:"


def test_on_a_device_a_rank_that_raises_says_so_first_and_waits_for_nobody():
    """The group's usual end waits there for all ranks, and one of them waits for this one."""
    waiting, raising = job("raises", device="yes")
    assert raising.returncode == 1, raising.stderr
    first, second = (match.start() for match in re.finditer("ValueError: on purpose", raising.stderr))
    assert raising.stderr.index(LEAVES) < first < second, raising.stderr  # ours at once, and Python's own
    assert "in raises" in raising.stderr[:first]
    assert waiting.returncode == 1 and waiting.stdout.strip() == "released", waiting.stderr


def test_on_gloo_a_rank_that_raises_ends_as_any_program_does():
    waiting, raising = job("raises")
    assert raising.returncode == 1 and raising.stderr.count("ValueError: on purpose") == 1, raising.stderr
    assert "aborts its process group" not in raising.stderr
    assert waiting.returncode == 1 and waiting.stdout.strip() == "released", waiting.stderr
