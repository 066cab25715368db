"""The table: all promises, the engines on which one cannot be kept, and the error that comes instead."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from gradsync.verify import also, even, uneven
from gradsync.verify.compare import Off, need
from gradsync.verify.homes import CPU, HOMES, home_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from gradsync.verify.homes import Home


class Row(NamedTuple):
    """A promise, and what tries it."""

    title: str
    play: Callable[[Home], None]


class Cell(NamedTuple):
    """A promise on an engine. If it has an `error`, that must come; if it has a `why_not`, nothing is tried."""

    row: Row
    unused: bool = False  # whether the model has a parameter that nothing uses
    error: str | None = None
    why_not: str | None = None
    of_several: bool = False  # whether the error is that ranks differ: one rank alone gets none

    def error_on(self, num_ranks: int) -> str | None:
        """The error that must come on so many ranks; None if none must."""
        return None if self.of_several and num_ranks == 1 else self.error


ROWS: dict[str, Row] = {
    row.play.__name__: row
    for row in (
        Row("full windows", even.full_windows),
        Row("a tail closed by .over", even.tail_over),
        Row("a tail closed by flush", even.tail_flush),
        Row('tail="drop"', even.tail_drop),
        Row('tail="carry"', even.tail_carry),
        Row("LossSum", even.loss_sum),
        Row("clip_norm", even.clipping),
        Row("a GradScaler, and an inf on one rank", even.amp_with_an_inf_on_one_rank),
        Row('nonfinite="skip", and an inf on one rank', even.nonfinite_on_one_rank),
        Row("reset", even.reset),
        Row("an exception in the body", even.exception_in_the_body),
        Row("an exception in a boundary's backward", even.exception_in_the_boundary_backward),
        Row("an exception in a held backward", even.exception_in_a_held_backward),
        Row("an exception in a forward", even.exception_in_the_forward),
        Row("sync_every", even.iterator),
        Row("sync_every, plain backward", even.iterator_plain_backward),
        Row("no_sync, then sync_gradients", even.no_sync_then_sync_gradients),
        Row("no_sync, then a backward", even.no_sync_then_backward),
        Row("a parameter that no rank used stays None", even.a_parameter_that_nobody_used),
        Row("a parameter used in early micro-batches only", even.a_parameter_used_only_early),
        Row("a layer that some ranks leave out", even.a_layer_that_some_ranks_leave_out),
        Row("overlap", also.overlap),
        Row("compress", also.compress),
        Row("fit", also.fit),
        Row("unequal ranks: .over", uneven.uneven_over),
        Row("unequal ranks: .over of unknown length", uneven.uneven_over_of_unknown_length),
        Row("unequal ranks: items without a call", uneven.uneven_over_that_passes_over_items),
        Row("unequal ranks: LossSum", uneven.uneven_loss_sum),
        Row("unequal ranks: a GradScaler", uneven.uneven_amp),
        Row('unequal ranks: tail="drop"', uneven.uneven_tail_drop),
        Row('unequal ranks: tail="carry"', uneven.uneven_tail_carry),
        Row("unequal ranks: skip=", uneven.uneven_skip),
        Row("unequal ranks: skip= in the first micro-batch", uneven.uneven_skip_first),
        Row("unequal ranks: .over, one without an item", uneven.uneven_over_from_nothing),
        Row("unequal ranks: sync_every", uneven.uneven_iterator),
        Row("unequal ranks: sync_every, plain backward", uneven.uneven_iterator_plain_backward),
        Row("unequal ranks: sync_every, one without an item", uneven.uneven_iterator_from_nothing),
    )
}

_UNUSED = "a_parameter_that_nobody_used"
_BY_HAND = ("no_sync_then_sync_gradients", "no_sync_then_backward")
# Promises whose errors are about ranks that differ.
_OF_SEVERAL = ("overlap", "compress", "uneven_over_from_nothing", "uneven_iterator_from_nothing", "uneven_skip_first")
# Engines whose forward waits for no other rank. On the others, a rank that has run out of items repeats its last call.
_SILENT = ("none", "bare", "ddp", "ddp_find_unused", "ddp_views", "ddp_static", "replicate")

_OUR_OWN = ("none", "bare")
_NO_OVERLAP = [engine for engine in HOMES if engine not in (*_OUR_OWN, "ddp", "ddp_views")]
_NOT_ONCE = ("fsdp2_each", "hsdp_each", "hsdp_shard")  # gradients travel more than once a window

# For a promise that an engine cannot keep: a pattern of the error that comes instead.
_ERRORS: dict[tuple[str, str], str] = {
    **{
        (engine, row): "either DTensors or plain gradients"
        for engine in ("fsdp2_no_root", "ddp_fsdp2")
        for row in ("amp_with_an_inf_on_one_rank", "uneven_amp")
    },
    **{(engine, "overlap"): "overlap needs a bare model, or a DistributedDataParallel" for engine in _NO_OVERLAP},
    **{(engine, "overlap"): "whose backward only hands its buckets on" for engine in ("ddp_find_unused", "ddp_static")},
    **{(engine, "compress"): "needs a bare model, whose gradients" for engine in HOMES if engine not in _OUR_OWN},
    **{(engine, "fit"): "without the others, but the forward of" for engine in HOMES if engine not in _SILENT},
    ("ddp_static", "fit"): "counts on the same backward each time",
    # gradsync has put no engine there yet.
    **{
        (engine, row): "no_sync holds the gradients of an engine back, but nothing synchronises"
        for engine in ("bare", "fsdp1_no_root", "fsdp2_no_root")
        for row in _BY_HAND
    },
    **{(engine, _UNUSED): "find_unused_parameters=True" for engine in ("ddp", "ddp_views", "replicate", "ddp_fsdp2")},
    ("ddp_static", "no_sync_then_sync_gradients"): "first synchronisation of a DDP with static_graph=True",
    # A rank that never had an item cannot repeat its last call. A static graph's first backward needs all ranks.
    ("ddp_static", "uneven_over_from_nothing"): r"needs at least one item in step.over .*, but rank 0.* has none",
    **{
        (engine, row): error
        for engine in HOMES
        if engine not in _SILENT
        for row, error in (
            ("uneven_over_from_nothing", r"needs at least one item in step.over .*, but rank 0.* has none"),
            ("uneven_skip_first", r"first micro-batch of step must be a good one .*, but rank \d+ dropped it"),
        )
    },
    **{
        (engine, "uneven_iterator_from_nothing"): r"needs at least one item in sync_every .*, but rank 0.* has none"
        for engine in HOMES
        if engine != "none"
    },
}

# For a promise that means something else on an engine: why it is not tried.
_WHY_NOT: dict[tuple[str, str], str] = {
    # `accumulating` reshards at the boundary; a loop with its own boundary must do that itself.
    ("fsdp2_gathered", "no_sync_then_backward"): "parameters that stay gathered beyond an update are stale",
    **{
        (engine, _UNUSED): "the gradient of a flat parameter is one tensor, with zeros where nothing came"
        for engine in HOMES
        if engine.startswith("fsdp1")
    },
    **{(engine, "overlap"): "sync is not 'window' there, which overlap needs" for engine in _NOT_ONCE},
    ("ddp_static", "no_sync_then_backward"): "torch's static graph has to synchronise its very first backward",
    ("ddp_static", "a_parameter_used_only_early"): "a static graph is the same in each backward",
    ("ddp_static", "a_layer_that_some_ranks_leave_out"): "a static graph is the same in each backward",
    **{
        (engine, "a_layer_that_some_ranks_leave_out"): "torch reduces a unit in the backward of each rank that uses it"
        for engine in HOMES
        if engine.startswith("fsdp1")
    },
}

CELLS: dict[tuple[str, str], Cell] = {
    (engine, name): Cell(
        row,
        name == _UNUSED,
        _ERRORS.get((engine, name)),
        _WHY_NOT.get((engine, name)),
        of_several=name in _OF_SEVERAL or (name in _BY_HAND and engine != "ddp_static"),
    )
    for engine in HOMES
    for name, row in ROWS.items()
}


def try_cell(engine: str, cell: Cell, device: torch.device = CPU) -> None:
    """Try a cell on all ranks at once; raise unless the promise holds, or the cell's error comes."""
    home = home_of(engine, unused=cell.unused, device=device)
    expected = cell.error_on(dist.get_world_size() if dist.is_initialized() else 1)
    if expected is None:
        cell.row.play(home)
        return
    try:
        cell.row.play(home)
    except RuntimeError as error:
        need(re.search(expected, str(error)), f"the error must say {expected!r}, but says {error}")
    else:
        raise Off(f"an error must come that says {expected!r}, but none came")
