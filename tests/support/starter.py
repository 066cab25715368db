"""Starts programs: forked from a process that has imported torch, with all else as under a `python` of their own.

    python -m tests.support.starter     # a line of JSON on stdin starts a program: see tests/support/programs.py

A program runs in this process's real `__main__` and falls off its end: an exit code, a traceback on stderr, atexit, and
what Python does with a module's globals as it ends are those of a command.
"""

import gc
import json
import os
import runpy
import signal
import sys
import tempfile
import time


def serve() -> "list[str] | None":
    """The command of a program, in the process that is to become it; None in the first one, when nobody asks any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those that wait have ended
    while line := sys.stdin.readline():
        job = json.loads(line)
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open(os.path.join(job["folder"], "pid"), "w") as file:
            file.write(str(os.getpid()))
        if pid := os.fork():
            wait(pid, job)
        become(job)
        return job["command"]
    return None


def wait(pid: int, job: dict) -> None:
    """Write how the program ends; one that takes too long is killed, with what it has started."""
    end, code = time.monotonic() + job["limit"], None
    while code is None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = str(os.waitstatus_to_exitcode(status))
        elif time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            code = "HANG"
        else:
            time.sleep(0.02)
    file = os.path.join(job["folder"], "code")
    with open(f"{file}.new", "w") as new:
        new.write(code)
    os.rename(f"{file}.new", file)
    os._exit(0)


def become(job: dict) -> None:
    os.setsid()
    for descriptor, name in enumerate(["/dev/null", *(os.path.join(job["folder"], one) for one in ("out", "err"))]):
        opened = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    tempfile.tempdir = None  # what TMPDIR says now
    sys.path[0] = job["cwd"]  # in the place of this module's
    path = [one for one in job["environment"].get("PYTHONPATH", "").split(os.pathsep) if one and one not in sys.path]
    sys.path[:0] = path
    for name in (name for folder in path for name in os.listdir(folder) if name.endswith(".py")):
        sys.modules.pop(name.removesuffix(".py"), None)  # torch has imported tqdm, and here may be another


if __name__ == "__main__":
    import torch._dynamo  # the first optimizer imports it, for seconds
    import torch.distributed.run

    import gradsync  # noqa: F401

    gc.collect()
    gc.freeze()
    command = serve()
    if command is not None and command[0] == "-m":
        sys.argv = command[1:]
        sys.modules.pop(command[1], None)
        runpy._run_module_as_main(command[1])  # what `python -m` calls
    elif command is not None:
        sys.argv, __file__, __spec__ = command, command[0], None
        sys.path.insert(0, os.path.dirname(command[0]))
        with open(command[0]) as file:
            code = compile(file.read(), command[0], "exec", dont_inherit=True)
        del command, file
        exec(code)
