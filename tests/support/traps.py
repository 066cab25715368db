"""Functions that go wrong in backward."""

from gradsync.verify.models import Poison, Trap  # noqa: F401
