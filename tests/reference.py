"""Moved to tests/support/; here until nothing imports it from here."""
from tests.support.reference import *  # noqa: F403
