"""Flush, reset, save, load, resume; and ranks at different places."""

from __future__ import annotations

from tests.programs.model import Model, Refused
from tests.programs.track import Track


def do_flush(model: Model, op: dict) -> None:
    f, result = op["f"], "end"
    if any(g == f for g, _ in model.waiting):
        return
    try:
        for (g, lane), track in model.tracks.items():
            if g == f and any(track.index):
                model.close(track, f, lane, filled=False, flushing=True)
    except Refused:
        result = "refused"
    for rank in model.ranks:
        model.act(rank, ["flush", f], result)
    model.look()


def do_reset(model: Model, op: dict) -> None:
    f = op["f"]
    if any(g == f for g, _ in model.waiting):
        return
    for rank in model.ranks:
        if op["all"] or rank in op["who"]:
            for (g, _), track in model.tracks.items():
                if g == f:
                    track.drop(rank)
            model.act(rank, ["reset", f], "end")
        else:
            model.act(rank, ["nothing"], "end")
    model.look()


def do_save(model: Model, op: dict) -> None:
    f = op["f"]
    model.slots[f, op["slot"]] = [(key, t.snapshot()) for key, t in model.tracks.items() if key[0] == f]
    model.slots_latest[f, op["slot"]] = [latest.get(f) for latest in model.latest]
    for rank in model.ranks:
        model.act(rank, ["save", f, op["slot"]], "end")
    model.look()


def do_load(model: Model, op: dict) -> None:
    f = op["f"]
    state = model.slots.get((f, op["slot"]))
    keys = [key for key in model.tracks if key[0] == f]
    if not state:
        return do_save(model, op)
    if [key for key, _ in state] != keys[: len(state)] or any(key in model.waiting for key in keys):
        return
    if not all(model.is_free(f, lane) for _, lane in keys):
        return
    torn = op["torn"] and model.num_ranks > 1 and keys and any(s["window"] != model.tracks[key].window for key, s in state)
    if torn:
        for rank in model.ranks:  # one rank alone goes back: the next time that they meet, all are told
            model.act(rank, ["load", f, op["slot"]] if rank == 0 else ["nothing"], "end")
            model.expected[rank][-1]["ended"] = True
            model.act(rank, ["flush", f], "refused")
        model.ended = True
        return model.look()
    latest = model.slots_latest[f, op["slot"]]
    for key in keys:  # one that was called first after the state was saved begins anew
        model.tracks[key] = Track(model.num_ranks, len(model.of(key[1])))
    for key, saved in state:
        model.tracks[key].restore(saved)
    for rank in model.ranks:
        if latest[rank] is not None:
            model.latest[rank][f] = latest[rank]
        model.act(rank, ["load", f, op["slot"]], "end")
    model.look()


def do_resume(model: Model, op: dict) -> None:
    """As a new process would: the function anew, and the state loaded before its first call."""
    f = op["f"]
    keys = [key for key in model.tracks if key[0] == f]
    if not all(model.is_free(f, lane) for _, lane in keys):
        return
    for key in keys:
        model.tracks[key].restore(model.tracks[key].snapshot())
        model.waiting.add(key)
    for rank in model.ranks:
        model.act(rank, ["resume", f], "end")
    model.look()


def do_cross(model: Model, op: dict) -> None:
    """Ranks at different places are all told so."""
    pair = [
        f for f in range(len(model.functions))
        if any(key[0] == f for key in model.tracks) and not any(key[0] == f for key in model.waiting)
    ]  # fmt: skip
    if model.num_ranks == 1 or len(pair) < 2:
        return
    for rank in model.ranks:
        model.act(rank, ["flush", pair[0] if rank else pair[1]], "refused")
    model.ended = True
    model.look()
