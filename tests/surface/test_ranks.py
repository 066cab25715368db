"""The tests' own ranks: they begin anew where gloo failed, once, and only there; and they tell what went wrong."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import CRASHES, MISMATCH, NOT_CONNECTED, RankError

SEGMENTATION_FAULT, ABORTED = CRASHES
IN_A_THREAD = {SEGMENTATION_FAULT: "strlen", ABORTED: "abort"}  # what ends the process so, in libc


def crash_without_python(function: str) -> None:
    """A thread that runs no Python crashes."""
    libc, thread = ctypes.CDLL("libc.so.6"), ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, getattr(libc, function), None)
    time.sleep(60)


def fails_at_first(path: str, store: str, text: str, times: int) -> int:
    """How often it was tried, by the lines of a file that is not a store."""
    folder = Path(path)
    (folder / "tried").open("a").write("x")
    tried = len((folder / "tried").read_text())
    assert not Path(store).exists(), "a store of an attempt that failed must not be used again"
    Path(store).write_text("addresses")
    if tried <= times:
        if text in IN_A_THREAD:
            crash_without_python(IN_A_THREAD[text])
        raise RuntimeError(text)
    return tried


@pytest.mark.parametrize("text", [NOT_CONNECTED, *CRASHES])
def test_ranks_begin_anew_where_gloo_failed(ranks, tmp_path, text):
    with pytest.warns(UserWarning, match=f"(?s)gloo failed, and the ranks began anew: .*{text}"):
        assert ranks(1).run(fails_at_first, str(tmp_path), str(tmp_path / "store"), text, 1) == [2]


@pytest.mark.filterwarnings("ignore:gloo failed:UserWarning")
@pytest.mark.parametrize(("text", "times"), [(NOT_CONNECTED, 2), (SEGMENTATION_FAULT, 2), (ABORTED, 2), ("something else", 1)])
def test_but_only_once_and_only_there(ranks, tmp_path, text, times):
    with pytest.raises(RankError, match=text):
        ranks(1).run(fails_at_first, str(tmp_path), str(tmp_path / "store"), text, times)


def do_not_match() -> None:
    """The ranks send each other different amounts, as after a disagreement: gloo ends the process."""
    size = 10 + 10 * dist.get_rank()
    dist.all_gather_into_tensor(torch.empty(2 * size), torch.zeros(size))


def test_and_not_where_collectives_do_not_match(ranks):
    """No warning comes before the error: the ranks did not begin anew, and what gloo said is there to read."""
    with pytest.raises(RankError, match=MISMATCH):
        ranks(2).run(do_not_match)


def fails_on_some() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(0.3 if dist.get_rank() == 0 else 60)
    raise ValueError("after it")


def test_who_failed_first_is_read_last_and_stacks_tell_where(ranks):
    """A crash in a thread that runs Python is an error of the test."""
    ranks(3).run(dist.get_rank)  # to start them takes longer than the limit
    with pytest.raises(RankError) as caught:
        ranks(3).run(fails_on_some, limit=1)
    hang, failed, crashed = str(caught.value).split("\nrank ")[1:]
    assert hang.startswith("2, ") and "HANG" in hang and "in fails_on_some" in hang
    assert failed.startswith("0, ") and "ValueError: after it" in failed
    assert crashed.startswith("1, ") and SEGMENTATION_FAULT in crashed and "in fails_on_some" in crashed
