"""The tests' own ranks: they begin anew where gloo could not connect them, once, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import NOT_CONNECTED, RankError


def fails_at_first(path: str, store: str, text: str, times: int) -> int:
    """How often it was tried, by the lines of a file that is not a store."""
    folder = Path(path)
    (folder / "tried").open("a").write("x")
    tried = len((folder / "tried").read_text())
    assert not Path(store).exists(), "a store of an attempt that failed must not be used again"
    Path(store).write_text("addresses")
    if tried <= times:
        raise RuntimeError(text)
    return tried


def test_ranks_begin_anew_where_gloo_could_not_connect_them(ranks, tmp_path):
    assert ranks(1).run(fails_at_first, str(tmp_path), str(tmp_path / "store"), NOT_CONNECTED, 1) == [2]


@pytest.mark.parametrize(("text", "times"), [(NOT_CONNECTED, 2), ("something else", 1)])
def test_but_only_once_and_only_there(ranks, tmp_path, text, times):
    with pytest.raises(RankError, match=text):
        ranks(1).run(fails_at_first, str(tmp_path), str(tmp_path / "store"), text, times)
