"""One file an engine, behind one protocol. Nothing in here knows of windows' numbers, losses or optimizers."""

from gradsync.engines._find import attach, behind, find, register, rest
from gradsync.engines._gloo import settle_all_groups
from gradsync.engines._protocol import TABLE_WIDTH, Engine, Table

__all__ = ["TABLE_WIDTH", "Engine", "Table", "attach", "behind", "find", "register", "rest", "settle_all_groups"]
