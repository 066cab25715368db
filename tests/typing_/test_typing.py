"""Types from both sides: what must be accepted is, and each wrong line is rejected."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ACCEPTS, REJECTS = ROOT / "tests/typing_/accepts.py", ROOT / "tests/typing_/rejects.py"


def marked() -> set[int]:
    lines = REJECTS.read_text().splitlines()
    found = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    assert len(found) > 10
    return found


# mypy keeps what it knows of torch for each version of Python, and takes half a minute to learn it; pyright does not.
@pytest.mark.parametrize("version", ["3.10", pytest.param("3.13", marks=pytest.mark.slow)])
def test_mypy(version):
    command = [sys.executable, "-m", "mypy", "--strict", "--python-version", version, "--no-error-summary"]
    done = subprocess.run([*command, str(ACCEPTS), str(REJECTS)], cwd=ROOT, capture_output=True, text=True, timeout=280)
    errors = re.findall(r"^(.*?):(\d+): error: (.*)$", done.stdout, re.M)
    assert {int(line) for file, line, _ in errors if file.endswith("rejects.py")} == marked(), done.stdout
    assert [error for error in errors if not error[0].endswith("rejects.py")] == []


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_pyright(version):
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--pythonversion", version]
    done = subprocess.run([*command, str(ACCEPTS), str(REJECTS)], cwd=ROOT, capture_output=True, text=True, timeout=280)
    found = [d for d in json.loads(done.stdout)["generalDiagnostics"] if d["severity"] == "error"]
    lines = {d["range"]["start"]["line"] + 1 for d in found if d["file"].endswith("rejects.py")}
    assert lines == marked(), found
    assert [d["message"] for d in found if not d["file"].endswith("rejects.py")] == []
