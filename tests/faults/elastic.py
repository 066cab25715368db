"""torchrun's own agent, for many small jobs in a row: the ranks are forked from it, with torch imported already.

    python tests/faults/elastic.py JOBS

JOBS is a JSON list of [spec, script, *options] for `disturbed.main`, each a job of two ranks. A line of JSON a job says
how it ended; a job that takes longer than its limit ends everything.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.faults import disturbed
from tests.support.ranks import PATIENCE

LIMIT = 40.0 * PATIENCE  # seconds for a job


def run(spec: str, script: str, *options: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a command; the agent's handler would wait for torch to return
    disturbed.main(spec, script, *options)


def launch(job: list[str], logs: str) -> dict:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=os.path.basename(logs),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.02,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL),
    )
    began = time.monotonic()
    try:
        elastic_launch(config, run)(*job)
        error = None
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
    output = {}
    for folder, _, files in os.walk(logs):
        for file in sorted(files):
            with open(os.path.join(folder, file), errors="replace") as stream:
                output[os.path.relpath(os.path.join(folder, file), logs)] = stream.read()
    return {"error": error, "seconds": time.monotonic() - began, "output": output}


if __name__ == "__main__":
    for job in json.loads(sys.argv[1]):
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        with tempfile.TemporaryDirectory() as logs:
            print(json.dumps(launch(job, logs)), flush=True)
    faulthandler.cancel_dump_traceback_later()
    os._exit(0)
