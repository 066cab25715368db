"""Two hosts for real, as far as one machine can: network namespaces with an address each, and a link that is cut.

Skipped where it is not root on Linux with iproute2. The traffic stays in the namespaces, which are gone afterwards.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradsync.bench import _hosts

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "resume.py")
TIMEOUT = 5  # seconds: the process group's
LIMIT = 60  # seconds for one job


def _possible() -> str | None:
    try:
        _hosts.check()
        with _hosts.two_hosts("1gbit"):
            return None
    except Exception as error:
        return str(error)


@pytest.fixture(scope="module")
def hosts():
    if reason := _possible():
        pytest.skip(reason)
    with _hosts.two_hosts("1gbit") as both:
        try:
            yield both
        finally:
            for host in both:
                stop_all_on(host)


def stop_all_on(host: _hosts.Host) -> None:
    """torchrun gives its ranks sessions of their own; whatever runs in this namespace is ours."""
    pids = subprocess.run(["ip", "netns", "pids", host.enter[-1]], capture_output=True, text=True, check=False).stdout
    for pid in pids.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass


def link(host: _hosts.Host, state: str) -> None:
    subprocess.run([*host.enter, "ip", "link", "set", _hosts.INTERFACE, state], check=True)


class Job:
    """The example on both hosts, a rank each."""

    def __init__(self, hosts, folder: Path, fault: dict) -> None:
        self._hosts = hosts
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": _hosts.INTERFACE
        }  # fmt: skip
        self._processes = [
            subprocess.Popen(
                [
                    *host.enter, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                    "--node-rank", str(rank), "--master-addr", hosts[0].address, "--master-port", "29400",
                    "-m", "tests.faults.disturbed", json.dumps({"timeout": TIMEOUT, **fault}),
                    EXAMPLE, "--quick", "--folder", str(folder),
                ],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip

    def end(self, limit: float = LIMIT) -> list[tuple[int, str]]:
        """Exit code and output of both, by rank."""
        stop = time.monotonic() + limit
        ended, hung = [], []
        for rank, process in enumerate(self._processes):
            try:
                printed, complaints = process.communicate(timeout=max(0.1, stop - time.monotonic()))
            except subprocess.TimeoutExpired:
                hung.append(rank)
                stop_all_on(self._hosts[rank])
                printed, complaints = process.communicate()
            ended.append((process.returncode, printed + complaints))
        assert not hung, f"HANG of rank {hung} after {limit} s:\n" + "\n".join(text[-3000:] for _, text in ended)
        return ended

    def parameters(self) -> str:
        ended = self.end()
        assert [code for code, _ in ended] == [0, 0], "\n".join(text[-3000:] for _, text in ended)
        (found,) = re.findall(r"parameters (\w{16})", ended[0][1])
        return found


def wait_for(file: Path) -> None:
    end = time.monotonic() + LIMIT
    while not file.exists():
        assert time.monotonic() < end, f"{file} did not come"
        time.sleep(0.02)


GRADIENTS = r"GradSyncError: Every rank must take part in synchronising the gradients of window \d+ of train_step"
AT_THE_STORE = r"GradSyncError: Every rank must come to the data of train_step.over, but "


def test_the_link_is_cut_and_a_host_is_lost(hosts, tmp_path):
    """Each time both sides end with an error that says what they waited for; at last the bits are those of a calm run."""

    def fails(fault: dict, end: Callable[[], None], back: Callable[[], None], *texts: str | None) -> None:
        pause = tmp_path / "pause"
        job = Job(hosts, tmp_path / "run", {**fault, "rank": 1, "pause": str(pause)})
        wait_for(pause)
        end()
        try:
            pause.unlink()
            began = time.monotonic()
            ended = job.end()
            took = time.monotonic() - began
        finally:
            back()
        for rank, ((code, said), text) in enumerate(zip(ended, texts)):
            assert code != 0 and (text is None or re.search(text, said)), f"rank {rank}, exit code {code}:\n{said[-4000:]}"
        assert took < TIMEOUT + 20, f"it took {took:.1f} s until both had ended"

    def cut() -> None:
        link(hosts[1], "down")

    def mend() -> None:
        link(hosts[1], "up")

    expected = Job(hosts, tmp_path / "calm", {}).parameters()
    # The third micro-batch of a window of 4: rank 0 goes on and waits at the boundary.
    fails({"function": "train_step", "line": 7}, cut, mend, GRADIENTS, GRADIENTS)
    # The start of the second epoch, where ranks meet at torchrun's store, which is on rank 0's host.
    texts = AT_THE_STORE + "rank 1 did not within", AT_THE_STORE + "the store .* does not answer within"
    fails({"function": "batches_of", "line": 2}, cut, mend, *texts)
    # Everything on the other host is killed, torchrun included.
    fails({"function": "train_step", "line": 7}, lambda: stop_all_on(hosts[1]), lambda: None, GRADIENTS, None)
    last = Job(hosts, tmp_path / "run", {}).end()
    assert [code for code, _ in last] == [0, 0], "\n".join(text[-3000:] for _, text in last)
    assert "going on after 34 micro-batches" in last[0][1] and f"parameters {expected}" in last[0][1], last[0][1]
