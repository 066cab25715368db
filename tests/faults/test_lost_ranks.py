"""A rank that dies, or stands still: the others say so in time. Nothing is simulated, and every wait has an end."""

from __future__ import annotations

import re

import pytest

from gradsync.ranks.lost import is_lost, lost
from tests.faults import cases
from tests.faults.play import SLACK, TIMEOUT, Play, play

WINDOW_1 = r"Every rank must take part in synchronising the gradients of window 1 of train_step, but this one waited in vain"


LEFT = r"A rank has ended or hangs, .* Start the job again from its last checkpoint, as torchrun --max-restarts does"


def check(seen: dict[int, dict], text: str, cause: str = "RuntimeError") -> None:
    assert seen
    for rank, saw in seen.items():
        assert saw["kind"] == "GradSyncError" and re.search(text, saw["text"]), f"rank {rank}: {saw}"
        assert saw["cause"] == cause, f"rank {rank}: {saw}"
        assert saw["seconds"] < TIMEOUT + SLACK, f"rank {rank}: {saw}"
        assert saw["gradients"] == saw["index"] == 0, f"rank {rank} keeps half a window: {saw}"
        assert saw["exit code"] == 0, f"rank {rank}: {saw}"


@pytest.mark.parametrize(
    ("wrap", "size", "dying", "moment"),
    [
        (cases.bare, 2, 1, cases.between), (cases.bare, 2, 0, cases.at_the_boundary),
        (cases.bare, 3, 1, cases.in_the_backward), (cases.ddp, 2, 1, cases.between),
        (cases.ddp, 2, 0, cases.in_the_backward), (cases.find_unused, 2, 1, cases.at_the_boundary),
        (cases.find_unused, 3, 0, cases.in_the_backward), (cases.static, 2, 1, cases.in_the_backward),
    ],
)  # fmt: skip
def test_a_rank_that_is_killed_in_a_window(wrap, size, dying, moment):
    check(play(cases.in_window_1, size, dying, wrap, moment), f"{WINDOW_1}: .*{LEFT}")


def test_a_rank_that_is_killed_in_a_held_micro_batch_that_synchronises():
    check(play(cases.in_a_held_micro_batch_that_synchronises, 2, 1, cases.fsdp2), f"{WINDOW_1}: .*{LEFT}")


def test_a_rank_that_is_killed_as_a_window_opens():
    """Rank 0 is whose buffers the others get when the window closes."""
    check(play(cases.as_a_window_opens, 2, 0), WINDOW_1)


def test_a_rank_that_nobody_sees_die():
    """It stands still, or dies before the ranks meet at the store: the process group's time-out ends the wait."""
    texts = {
        cases.in_window_1: WINDOW_1,
        cases.at_the_first_call: r"must come to the first window of train_step with these models, but rank 1 did not",
        cases.at_the_first_boundary: r"must come to the first boundary of train_step, but rank 1 did not",
        cases.at_the_start_of_over: r"must come to the data of train_step.over, but rank 1 did not within the process group's",
        cases.before_it_hears_that_the_others_have_run_out: (
            r"must take part in (synchronising the gradients of window \d of train_step|the windows of train_step.over that)"
        ),
        cases.at_flush: r"must come to flush of train_step, but rank 1 did not",
    }
    every = list(texts)
    for pair in zip(every[::2], every[1::2], strict=True):  # they do little but wait
        how = {cases.in_window_1: [cases.bare, cases.standing_still]}
        plays = [Play(case, 2, 1, *how.get(case, [])) for case in pair]
        for case, (saw,) in [(case, running.seen().values()) for case, running in zip(pair, plays)]:
            assert saw["kind"] == "GradSyncError" and re.search(texts[case], saw["text"]) and saw["exit code"] == 0, saw
            assert TIMEOUT / 2 < saw["seconds"] < TIMEOUT + SLACK, saw
            assert saw["index"] == (2 if case is cases.at_flush else 0), "a flush that nobody took part in has changed nothing"


def test_a_rank_that_is_killed_after_the_others_have_run_out_of_data():
    check(play(cases.after_the_others_have_run_out, 2, 1), WINDOW_1)


def test_a_rank_that_is_killed_in_sync_every():
    seen = play(cases.in_sync_every, 2, 1)
    seen[0]["gradients"] = 0  # they are the user's there
    check(seen, r"synchronising the gradients of window 2 of sync_every")


def test_a_rank_that_is_killed_in_a_backward_of_the_users_own():
    """Where DDP itself waits, the error is torch's, as nobody can come between the two; then a warning says more."""
    (bare,), (ddp,) = (play(cases.in_sync_every, 2, 1, True, wrap).values() for wrap in (cases.bare, cases.ddp))
    for saw in (bare, ddp):
        assert saw["seconds"] < TIMEOUT + SLACK, saw
    assert bare["kind"] == "GradSyncError" and not bare["warned"], bare
    assert re.search(r"take part in synchronising the gradients of window 2 of sync_every", bare["text"])
    assert ddp["kind"] == "RuntimeError" and is_lost(RuntimeError(ddp["text"])), ddp
    (text,) = ddp["warned"]
    assert re.search(r"take part in synchronising the gradients of window 2 of sync_every, but .* error that follows", text)


def test_a_rank_that_is_killed_before_sync_gradients():
    check(play(cases.in_sync_gradients, 2, 0), r"must take part in sync_gradients, but this one waited in vain")


@pytest.mark.parametrize("wrap", [cases.bare, cases.find_unused])
def test_the_first_error_is_not_hidden_by_the_dead_rank(wrap):
    """A backward that fails on its own completes its collectives; that these fail as well is not what is told."""
    (saw,) = play(cases.while_another_fails, 2, 1, wrap).values()
    assert (saw["kind"], saw["text"]) == ("ZeroDivisionError", "the user's own")
    assert saw["seconds"] < TIMEOUT + SLACK and saw["gradients"] == saw["index"] == 0


def test_an_error_in_the_body_stays_what_it_is():
    (saw,) = play(cases.in_the_body, 2, 1).values()
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
