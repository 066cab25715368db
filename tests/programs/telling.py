"""Telling stories on real ranks, many in one call, and making those smaller that end as no story may."""

from __future__ import annotations

import pprint
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.changes.rule import Outcome, exact_or_error
from tests.changes.together import _alone, _together
from tests.programs.stories import draw, tell

BATCH = 25  # stories in one call on the ranks
LIMIT = 20.0  # seconds a story may take; one takes a few tenths


class Told:
    """How the stories ended."""

    def __init__(self) -> None:
        self.kinds: Counter = Counter()
        self.edits: Counter = Counter()
        self.refusals: Counter = Counter()
        self.failures: list[tuple[dict, str]] = []
        self.start = time.monotonic()

    def add(self, story: dict, outcomes: list) -> None:
        self.edits.update(op["do"] for op in story["ops"])
        try:
            kind = exact_or_error([one if isinstance(one, Outcome) else Outcome("foreign", str(one)) for one in outcomes])
        except AssertionError as error:
            kind = "failed"
            self.failures.append((story, str(error)))
        self.kinds[kind] += 1
        if kind == "error":
            self.refusals[outcomes[0].text[:70]] += 1

    def __str__(self) -> str:
        return f"{sum(self.kinds.values())} stories in {time.monotonic() - self.start:.0f} s: {dict(self.kinds)}"


def run_stories(number: int, pool, first: int = 0, *, shrink: bool = True) -> Told:
    """The stories `first` to `first + number`."""
    told = Told()
    stores = Path(tempfile.mkdtemp(prefix="gradsync-stories-"))
    by_size: dict[int, list[dict]] = {}
    for one in range(first, first + number):
        story = draw(one)
        by_size.setdefault(story["ranks"], []).append(story)
    for size, stories in by_size.items():
        for start in range(0, len(stories), BATCH):
            _tell(told, pool, size, stories[start : start + BATCH], stores)
    if shrink:
        told.failures = [(_smaller(pool, story, stores), text) for story, text in told.failures[:3]]
    return told


def _tell(told: Told, pool, size: int, stories: list[dict], stores: Path) -> None:
    while stories:
        cases = [(story, str(stores / f"{story['number']}")) for story in stories]
        values = _together(pool, size, tell, cases, LIMIT)
        if not values:  # a rank hung or died: which story that was is told by each alone
            for story in stories:
                told.add(story, _once(pool, story, stores))
            return
        for story, outcomes in zip(stories, values):
            told.add(story, outcomes)
        if len(values) < len(stories):
            pool(size).stop()  # they ended the last one differently
        stories = stories[len(values) :]


def _once(pool, story: dict, stores: Path) -> list:
    store = tempfile.mktemp(prefix="store-", dir=stores)
    outcomes = _alone(pool, story["ranks"], tell, (story, store), LIMIT)
    if len({getattr(one, "kind", "") for one in outcomes}) > 1 and story["ranks"] > 1:
        pool(story["ranks"]).stop()
    return outcomes


def _smaller(pool, story: dict, stores: Path) -> dict:
    """The story with fewer things done in it, that fails as well."""
    place = 0
    while place < len(story["ops"]):
        shorter = {**story, "ops": [*story["ops"][:place], *story["ops"][place + 1 :]]}
        told = Told()
        told.add(shorter, _once(pool, shorter, stores))
        if told.failures:
            story = shorter
        else:
            place += 1
    for key, value in (("hooks", False), ("scaler", False), ("counts", None), ("two", False), ("how", "accumulating")):
        simpler = {**story, key: value}
        told = Told()
        told.add(simpler, _once(pool, simpler, stores))
        if told.failures:
            story = simpler
    return story


def show(told: Told) -> str:
    failures = "\n".join(f"{pprint.pformat(story, width=140)}\n{text}\n" for story, text in told.failures)
    return f"{failures}{told}"
