"""A `sync_every` loop between the others."""

from __future__ import annotations

from tests.programs.model import Model
from tests.programs.track import Held


def do_sync(model: Model, op: dict) -> None:
    """A `sync_every` loop between the others."""
    lane, kind = op["lane"] % len(model.lanes), op["kind"]
    if not model.is_free(None, lane) or any(any(t.opened) for (_, other), t in model.tracks.items() if other == lane):
        return
    lengths = [op["lengths"][rank] for rank in model.ranks]
    if op["endless"]:
        lengths = [lengths[0]] * model.num_ranks
    if any(lengths):
        lengths = [max(1, length) for length in lengths]
    steps, leave, plain = op["steps"], op["leave"], op["plain"] and kind == "mean"
    if leave is not None and (op["endless"] or min(lengths) <= leave + 1):
        leave = None
    if plain or model.needs_all(lane):
        op = {**op, "part": False}
    items = [[model.micro_batch(None, lane, op, "ok", kind) for _ in range(length)] for length in lengths]
    start = number = 0
    while start < max(lengths):
        size = steps[number % len(steps)]
        whole, end = Held(len(model.of(lane))), start + size
        if leave is not None and leave < end - 1 or (op["endless"] and end > lengths[0]):
            break
        for rank in model.ranks:
            for mb in items[rank][start:end]:
                loss, grads = model.gradient(None, lane, mb)
                whole.add(loss, mb["count"], grads)
        total = whole.count if kind == "sum" else whole.num
        if plain:
            total = size * model.num_ranks
        model.update(lane, [None if g is None or not total else g / total for g in whole.grads])
        model.num_windows += 1
        start, number = end, number + 1
        if leave is not None and leave == end - 1:
            break
    for rank in model.ranks:
        mode = "endless" if op["endless"] else "sized" if op["sized"] else "unsized"
        model.act(rank, ["sync", lane, steps, items[rank], mode, leave, plain], "end")
    model.look()
