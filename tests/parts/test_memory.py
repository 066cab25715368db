"""Real memory, and too little of it."""

import json
import os
import subprocess
import sys

import torch

from tests.parts import memory_process


def test_a_batch_that_is_four_times_too_large():
    """A process under a limit on its address space ends with the parameters of one that has the memory."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.parts.memory_process", "24"],
        capture_output=True,
        text=True,
        timeout=120,
        # Large blocks go back to the system, and leave no holes: then what fits does not depend on what came before.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"},
    )
    assert ran.returncode == 0, ran.stderr
    error, numbers, parts = json.loads(ran.stdout)
    assert "can't allocate memory" in error  # what happens without fit
    assert all(number >= 4 for number, _ in parts), parts
    assert "train_step ran out of memory with" in ran.stderr
    expected, _ = memory_process.train()
    torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected), rtol=1e-5, atol=1e-5)
