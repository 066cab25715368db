"""Moved to tests/support/ranks.py; here until nothing imports it from here."""
from tests.support.ranks import GROUP_TIMEOUT, TIME_LIMIT, RankError, Ranks  # noqa: F401
