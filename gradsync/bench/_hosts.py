"""Two hosts on one machine: network namespaces joined by a link of a given rate. Linux, root and iproute2."""

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from gradsync.bench._errors import BenchError

INTERFACE = "gradsync0"
ADDRESSES = "10.77.0.1", "10.77.0.2"
"""Every run can use the same addresses, because they exist only inside its own namespaces."""

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class Host(NamedTuple):
    """One end of the link."""

    enter: tuple[str, ...]
    """The words in front of a command that make it run on this host."""
    address: str


def rate(link: str) -> float:
    """Bits a second of a rate as `tc` writes it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", link)
    if match is None or float(match[1]) == 0:
        raise BenchError(f"A link's rate is written as 100mbit or 2.5gbit (kbit, mbit, gbit); it came as {link!r}.")
    return float(match[1]) * _UNITS[match[2]]


def check() -> None:
    """Find out before anything is made whether this machine can hold two hosts."""
    if not sys.platform.startswith("linux"):
        raise BenchError(f"--hosts needs Linux's network namespaces; this is {sys.platform}. Leave --hosts out here.")
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise BenchError(
            f"--hosts needs {' and '.join(missing)} of iproute2, which this machine does not have: "
            "`apt-get install -y iproute2`."
        )
    if os.geteuid() != 0:
        raise BenchError("--hosts makes network namespaces, which needs root; start the bench with sudo.")


@contextmanager
def two_hosts(link: str) -> Iterator[tuple[Host, Host]]:
    """Hosts that reach each other, and nothing else, at the link's rate in each direction. They are gone afterwards."""
    bits = rate(link)
    run = f"gradsync-{os.getpid()}-{secrets.token_hex(3)}"
    names = f"{run}-0", f"{run}-1"
    try:
        for name in names:
            _ip("netns", "add", name)
        ends = [("name", INTERFACE, "netns", name) for name in names]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", interface, "up")
            # The token bucket holds 4 ms of the rate. With less, a fast link does not reach its rate. With more, a slow
            # link is too fast after a pause, because it has saved tokens.
            burst = max(64 * 1024, int(bits / 8 * 0.004))
            shape = ("rate", f"{bits:.0f}bit", "burst", str(burst), "latency", "100ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape)
        yield (
            Host(("ip", "netns", "exec", names[0]), ADDRESSES[0]),
            Host(("ip", "netns", "exec", names[1]), ADDRESSES[1]),
        )
    finally:
        for name in names:  # deleting a namespace deletes its end of the link, and so the link
            with suppress(BenchError):  # it may never have been made
                _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    # In a session of its own, where a second Ctrl-C does not reach it.
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)  # noqa: S603
    if done.returncode:
        raise BenchError(
            f"Two hosts could not be made: `{' '.join(command)}` answered: {done.stderr.strip() or done.returncode}. "
            "A container needs the capabilities NET_ADMIN and SYS_ADMIN for it."
        )
