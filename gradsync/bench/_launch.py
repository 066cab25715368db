"""Starts a group of ranks, follows them to their result, and leaves none behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

from gradsync.bench import _rank
from gradsync.bench._errors import BenchError
from gradsync.bench._hosts import INTERFACE, Host
from gradsync.bench._records import Measured, Options, Place, dump_task, load_measured

POLL_SECONDS = 0.1
GRACE_SECONDS = 3.0
"""How long other ranks may take to fail after the first, and how long ranks may take to end when told to."""

LAST_LINES = 20
MAX_TOLD = 4
"""The most ranks that an error describes, if several hang together."""


class _Rank(NamedTuple):
    number: int
    process: subprocess.Popen[bytes]
    log: Path

    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def stood_at(self) -> list[str]:
        """Read what faulthandler's watchdog wrote at the limit; empty if the limit was not reached."""
        return list(dropwhile(lambda line: not line.startswith("Timeout ("), self.lines()))

    def last_words(self) -> str:
        code = self.process.returncode
        if self.stood_at():
            how, said = "had not ended at its --limit. It stood at:", self.stood_at()[:LAST_LINES]
        elif code < 0:
            how, said = f"was ended by {signal.Signals(-code).name}. Its last lines:", self.lines()[-LAST_LINES:]
        else:
            how, said = f"ended with exit code {code}. Its last lines:", self.lines()[-LAST_LINES:]
        return "\n    ".join((f"rank {self.number} {how}", *(said or ["(none)"])))


def launch(
    options: Options, place: Place, hosts: Sequence[Host], say: Callable[[str], None], *, gpus: bool
) -> Measured:
    """Run `place.ranks` ranks, spread evenly over the hosts (none: on loopback), and return what they measured."""
    with tempfile.TemporaryDirectory(prefix="gradsync-bench-") as name:
        folder = Path(name)
        (folder / _rank.TASK).write_text(dump_task(options, place))
        with _started(folder, place, hosts, options.threads, gpus=gpus) as ranks:
            _follow(ranks, folder / _rank.PROGRESS, time.monotonic() + options.limit + 2 * GRACE_SECONDS, say)
        result = folder / _rank.RESULT
        if not result.exists():
            raise BenchError(f"All ranks of {place.name} ended without an error, but also without a result.")
        return load_measured(result.read_text())


@contextmanager
def _started(folder: Path, place: Place, hosts: Sequence[Host], threads: int, *, gpus: bool) -> Iterator[list[_Rank]]:
    ranks: list[_Rank] = []
    ranks_a_host = place.ranks // place.hosts
    common = {
        **os.environ,
        "WORLD_SIZE": str(place.ranks),
        "LOCAL_WORLD_SIZE": str(ranks_a_host),
        "GROUP_WORLD_SIZE": str(place.hosts),
        "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        **({"GLOO_SOCKET_IFNAME": INTERFACE} if hosts else _loopback()),
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    try:
        for number in range(place.ranks):
            host, local = divmod(number, ranks_a_host)
            own = {"RANK": str(number), "LOCAL_RANK": str(local), "GROUP_RANK": str(host)}
            log = folder / f"rank{number}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(  # noqa: S603 - this Python, on a file of our own
                    (*(hosts[host].enter if hosts else ()), sys.executable, "-m", _rank.__name__, str(folder)),
                    env={**common, **own},
                    stdin=subprocess.PIPE,  # held open: a rank ends when it closes
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the bench alone, which ends its ranks in order
                )
            ranks.append(_Rank(number, process, log))
        yield ranks
    finally:
        _end(ranks)


def _follow(ranks: list[_Rank], progress: Path, deadline: float, say: Callable[[str], None]) -> None:
    shown = 0
    while any(rank.process.poll() is None for rank in ranks):
        if any(rank.failed() for rank in ranks):
            break
        if time.monotonic() > deadline:
            # Ranks have a limit of their own, at which they write where they stand. These could not even do that.
            raise BenchError("The ranks did not end at their --limit, and were killed.")
        lines = progress.read_text().splitlines() if progress.exists() else []
        for line in lines[shown:]:
            say(line)
        shown = len(lines)
        time.sleep(POLL_SECONDS)
    if any(rank.failed() for rank in ranks):
        _wait(ranks, GRACE_SECONDS)
        # One rank fails, and the others fail because of it. Ranks that a signal has ended come first, because they
        # could not say why; the others are in the order of their last output.
        failed = sorted(
            (rank for rank in ranks if rank.failed()),
            key=lambda rank: (rank.process.returncode > 0, rank.log.stat().st_mtime),
        )
        told = [failed[0], *(rank for rank in failed[1:] if rank.stood_at())][:MAX_TOLD]
        untold = [str(rank.number) for rank in failed if rank not in told]
        after = f"\nAfter it failed: rank {', '.join(untold)}." if untold else ""
        words = "\n".join(rank.last_words() for rank in told)
        raise BenchError(f"The bench could not go on: {words}{after}")


def _wait(ranks: list[_Rank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _end(ranks: list[_Rank]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if rank.process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):  # ended just now
                    os.killpg(rank.process.pid, how)
        _wait(ranks, GRACE_SECONDS)
    for rank in ranks:
        if rank.process.stdin is not None:
            rank.process.stdin.close()


def _loopback() -> dict[str, str]:
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
