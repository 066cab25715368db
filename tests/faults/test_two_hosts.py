"""Two hosts for real, as far as one machine can: network namespaces with an address each, and a link that is cut.

Skipped where it is not root on Linux with iproute2. The traffic stays in the namespaces, which are gone afterwards.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradsync.bench import _hosts
from tests.support.programs import ENVIRONMENT, ROOT, Programs
from tests.support.ranks import PATIENCE

EXAMPLE = str(ROOT / "examples" / "resume.py")
DISTURBED = str(ROOT / "tests" / "faults" / "disturbed.py")
TIMEOUT = 5  # seconds: the process group's
LIMIT = 60  # seconds for one job


def _possible() -> str | None:
    try:
        _hosts.check()
        with _hosts.two_hosts("1gbit"):
            return None
    except Exception as error:
        return str(error)


class Host:
    """One of the two, and what starts programs there."""

    def __init__(self, where: _hosts.Host) -> None:
        self.address, self.enter = where.address, where.enter
        self.programs = Programs(where.enter, {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": _hosts.INTERFACE})

    def kill(self, *but: int | None) -> None:
        """Whatever runs in this namespace is ours."""
        listed = subprocess.run(["ip", "netns", "pids", self.enter[-1]], capture_output=True, text=True, check=False)
        for pid in set(map(int, listed.stdout.split())) - {*but}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def link(self, state: str) -> None:
        subprocess.run([*self.enter, "ip", "link", "set", _hosts.INTERFACE, state], check=True)


@pytest.fixture(scope="module")
def hosts():
    if reason := _possible():
        pytest.skip(reason)
    with _hosts.two_hosts("1gbit") as both:
        hosts = [Host(one) for one in both]
        try:
            yield hosts
        finally:
            for host in hosts:
                host.programs.stop()
                host.kill()


class Job:
    """The example on both hosts, a rank each."""

    def __init__(self, hosts: list[Host], folder: Path, fault: dict) -> None:
        self._hosts = hosts
        self._programs = [
            host.programs.start(
                "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank),
                "--master-addr", hosts[0].address, "--master-port", "29400", "--start-method", "fork", "--run-path",
                DISTURBED, json.dumps({"timeout": TIMEOUT, **fault}), EXAMPLE, "--quick", "--folder", str(folder),
                limit=LIMIT,
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip

    def kill(self, rank: int) -> None:
        """All of it on one host, torchrun included."""
        host = self._hosts[rank]
        host.kill(host.programs.starter, self._programs[rank].waiter)

    def end(self) -> list[tuple[int, str]]:
        """Exit code and output of both, by rank."""
        ended = [one.ended() for one in self._programs]
        return [(code, printed + complaints) for code, printed, complaints in ended]

    def parameters(self) -> str:
        ended = self.end()
        assert [code for code, _ in ended] == [0, 0], "\n".join(text[-3000:] for _, text in ended)
        (found,) = re.findall(r"parameters (\w{16})", ended[0][1])
        return found


def wait_for(file: Path) -> None:
    end = time.monotonic() + LIMIT * PATIENCE
    while not file.exists():
        assert time.monotonic() < end, f"{file} did not come"
        time.sleep(0.02)


GRADIENTS = r"GradSyncError: Every rank must take part in synchronising the gradients of window \d+ of train_step"
AT_THE_STORE = r"GradSyncError: Every rank must come to the data of train_step.over, but "


def test_the_link_is_cut_and_a_host_is_lost(hosts, tmp_path):
    """Each time both sides end with an error that says what they waited for; at last the bits are those of a calm run."""

    def fails(fault: dict, end: Callable[[Job], None], *texts: str | None) -> None:
        pause = tmp_path / "pause"
        job = Job(hosts, tmp_path / "run", {**fault, "rank": 1, "pause": str(pause)})
        wait_for(pause)
        end(job)
        try:
            pause.unlink()
            began = time.monotonic()
            ended = job.end()
            took = time.monotonic() - began
        finally:
            hosts[1].link("up")
        for rank, ((code, said), text) in enumerate(zip(ended, texts)):
            assert code != 0 and (text is None or re.search(text, said)), f"rank {rank}, exit code {code}:\n{said[-4000:]}"
        assert took < TIMEOUT + 20 * PATIENCE, f"it took {took:.1f} s until both had ended"

    def cut(job: Job) -> None:
        hosts[1].link("down")

    expected = Job(hosts, tmp_path / "calm", {}).parameters()
    # The third micro-batch of a window of 4: rank 0 goes on and waits at the boundary.
    fails({"function": "train_step", "line": 7}, cut, GRADIENTS, GRADIENTS)
    # The start of the second epoch, where ranks meet at torchrun's store, which is on rank 0's host.
    texts = AT_THE_STORE + "rank 1 did not within", AT_THE_STORE + "the store .* does not answer within"
    fails({"function": "batches_of", "line": 2}, cut, *texts)
    # Everything on the other host is killed, torchrun included.
    fails({"function": "train_step", "line": 7}, lambda job: job.kill(1), GRADIENTS, None)
    last = Job(hosts, tmp_path / "run", {}).end()
    assert [code for code, _ in last] == [0, 0], "\n".join(text[-3000:] for _, text in last)
    assert "going on after 34 micro-batches" in last[0][1] and f"parameters {expected}" in last[0][1], last[0][1]
