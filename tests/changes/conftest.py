"""The stories on several ranks take minutes: `pytest -m slow tests/changes` runs them, and a plain pytest one of each kind, and what is quick.

What runs in this process alone is quick, and runs always.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
ALWAYS = {"test_one_of_each.py", "test_in_the_body.py"}


def pytest_collection_modifyitems(items):
    for item in items:
        path = Path(item.fspath)
        if HERE in path.parents and path.name not in ALWAYS and "ranks" in item.fixturenames:
            item.add_marker(pytest.mark.slow)
