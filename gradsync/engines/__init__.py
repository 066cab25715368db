"""The engines, with one protocol. They know nothing of counts or optimizers. README.md says what is in which file."""

from gradsync.engines._attach_ddp_behind import attach
from gradsync.engines._buckets import gradients_in, in_pairs
from gradsync.engines._ddp_forward_shortcut import is_compiled
from gradsync.engines._find import (
    bare,
    behind,
    common_group,
    find,
    is_engine,
    is_in_pieces,
    register,
    twins_of,
    uncovered,
    ungather,
)
from gradsync.engines._gloo import settle_all_groups
from gradsync.engines._protocol import Engine
from gradsync.engines._reducer_errors import clarify

__all__ = [
    "Engine",
    "attach",
    "bare",
    "behind",
    "clarify",
    "common_group",
    "find",
    "gradients_in",
    "in_pairs",
    "is_compiled",
    "is_engine",
    "is_in_pieces",
    "register",
    "settle_all_groups",
    "twins_of",
    "uncovered",
    "ungather",
]
