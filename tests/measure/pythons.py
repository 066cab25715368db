"""How a loop was left, told by the instructions of other Pythons: `python -m tests.measure.pythons`.

The library asks the interpreter one thing that differs between versions: at which instruction a loop's frame stands
(`gradsync/_frames.py`). This runs all of `tests/loops/ways_to_leave.py` on CPythons that npm has, built for WebAssembly
(pyodide). torch is not needed. It needs node and npm.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parents[2]
PYODIDES = {"3.10": "0.22.1", "3.11": "0.25.1", "3.12": "0.27.7", "3.13": "0.29.4", "3.14": "314.0.7"}
RUN = """
const {loadPyodide} = require("pyodide");
loadPyodide().then((python) => python.runPython(require("fs").readFileSync("program.py", "utf8")));
"""
ENDS = """
import sys
came = wrong(is_left_on_purpose, drawn_by)
print(sys.version.split()[0], len(WAYS), "ways to leave a loop:", "all told right" if not came else f"wrong: {came}")
"""


def program() -> str:
    sources = [HERE / "gradsync" / "_frames.py", HERE / "tests" / "loops" / "ways_to_leave.py"]
    future = "from __future__ import annotations\n"
    return future + "".join(one.read_text(encoding="utf-8").replace(future, "") for one in sources) + ENDS


def main() -> int:
    code = 0
    for python, pyodide in PYODIDES.items():
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "program.py").write_text(program(), encoding="utf-8")
            (pathlib.Path(folder) / "run.cjs").write_text(RUN, encoding="utf-8")
            subprocess.run(["npm", "install", "--silent", f"pyodide@{pyodide}"], cwd=folder, check=True, timeout=300)
            ran = subprocess.run(
                ["node", "run.cjs"], cwd=folder, check=True, timeout=300, capture_output=True, text=True
            ).stdout
        print(ran.strip())
        code |= not ran.startswith(python) or "wrong" in ran
    return code


if __name__ == "__main__":
    sys.exit(main())
