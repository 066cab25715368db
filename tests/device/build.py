"""The fake device's library, built once for each torch, Python and source, into a cache directory."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
NAME = "_fakedevice"
FLAGS = ["-O0", "-std=c++20", "-fPIC", "-shared", "-w", f"-DTORCH_EXTENSION_NAME={NAME}", "-DUSE_C10D_GLOO"]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gradsync-fakedevice"


def why_not() -> str | None:
    """Why the device cannot be built here; None where it can."""
    if shutil.which("g++") is None:
        return "the fake device is built with g++, which is not installed here"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the fake device is built with Python.h, which is not installed here (python3-dev)"
    if list(_torch().glob("lib/libtorch_cuda*")):
        return "the fake device takes the place of CUDA's, and this torch has been built with CUDA"
    return None


def library() -> Path:
    """The library; about half a minute the first time. Processes that ask at once build it once."""
    built = CACHE / _fingerprint() / f"{NAME}.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    with open(built.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            unfinished = built.with_suffix(".unfinished")
            done = subprocess.run(_command(unfinished), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"g++ could not build the fake device:\n{done.stderr[-4000:]}")
            unfinished.rename(built)
    return built


def _command(output: Path) -> list[str]:
    torch = _torch()
    folders = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{torch / 'lib'}"]
    return ["g++", *FLAGS, *(f"-I{folder}" for folder in folders), str(SOURCE / "device.cpp"), "-o", str(output), *libraries]


def _torch() -> Path:
    """Where torch is installed, found without importing it."""
    return Path(find_spec("torch").origin).parent


def _fingerprint() -> str:
    """What the library depends on."""
    told = hashlib.sha256(repr((FLAGS, version("torch"), sysconfig.get_config_var("SOABI"), str(_torch()))).encode())
    for file in sorted(SOURCE.iterdir()):
        told.update(file.read_bytes())
    return told.hexdigest()[:16]
