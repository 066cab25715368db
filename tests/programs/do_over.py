"""Data of a length of its own on each rank, in `over`."""

from __future__ import annotations

from tests.programs.choose import another_inside, leaving
from tests.programs.micro_batches import SKIPS
from tests.programs.model import Model, Refused


def do_over(model: Model, op: dict) -> None:
    """Data of a length of its own on each rank."""
    f, settings = op["f"], model.functions[op["f"]]
    lanes = [model.lane_of(f, op["lane"])]
    if op["all_lanes"] and len(settings["lanes"]) > 1:
        lanes = list(settings["lanes"])
    if not all(model.is_free(f, lane) for lane in lanes):
        return
    known = [(f, lane) in model.tracks and (f, lane) not in model.waiting for lane in lanes]
    named = settings["named"] and not model.waiting.intersection((f, lane) for lane in lanes)
    lengths = [op["lengths"][rank] for rank in model.ranks]
    passed = {(p["rank"], p["item"]) for p in op["passed"]}  # items without a call
    faults = {(fault["rank"], fault["at"]): fault["event"] for fault in op["faults"]}
    twice = op["twice"] and len(lanes) == 1
    inner = None
    if len(lanes) > 1:
        # Where ranks run out in a loop of several windows, these must be in step with each other.
        old = [model.tracks[f, lane] for lane in lanes if (f, lane) in model.tracks]
        if any(t.is_open or any(t.opened) for t in old) or len({t.window for t in old} | ({0} if len(old) < len(lanes) else set())) > 1:
            return
        faults = {key: event for key, event in faults.items() if event in SKIPS and settings["skip"]}
        passed = set()
    if twice:
        passed = set()
    some = [any((rank, item) not in passed for item in range(lengths[rank])) for rank in model.ranks]
    if not any(some) and not all(known):
        return  # nothing to know it by
    several = sum(g == f and (g, lane) not in model.waiting for g, lane in model.tracks) > len(lanes)
    if not all(some) and (several or len(lanes) > 1 or not (all(known) or named)):
        for rank in model.ranks:  # each rank gets an item, so that each knows the models
            lengths[rank] = max(1, lengths[rank])
            passed -= {(rank, 0)}
    fresh = not any(g == f and (g, lane) not in model.waiting for g, lane in model.tracks)
    tracks = [model.track(f, lane) for lane in lanes]
    if fresh and named and len(lanes) == 1:
        for rank in model.ranks:  # one that never calls gets to know its models as the data ends
            model.latest[rank].setdefault(f, (f, lanes[0]))
    leave = leaving(model, op, f, tracks, lengths, passed, faults, twice)
    inner = another_inside(model, op, f, lanes, tracks, lengths, passed, faults, leave)
    items = [[[] for _ in range(length)] for length in lengths]
    result, uneven = "end", False
    for lane, track in zip(lanes, tracks, strict=True):
        queues = []
        for rank in model.ranks:
            calls = []
            for item in range(lengths[rank]):
                if leave and item > leave["item"]:
                    break
                if (rank, item) in passed:
                    continue
                for _ in range(1 + twice):
                    event = faults.get((rank, len(calls)), "ok")
                    out = bool(leave and leave["how"] == "boom" and item == leave["item"])
                    calls.append((item, "raise" if out else event, out))
                    if out:
                        break
            queues.append(calls)
        try:
            uneven |= run_windows(model, track, f, lane, op, queues, items, lengths, closing=leave is None)
        except Refused:
            result = "refused"
    if leave is None and result == "end" and settings["tail"] != "carry":
        try:  # the data's end closes what other calls of the function have left open
            for (g, other), track in model.tracks.items():
                if g == f and other not in lanes and (g, other) not in model.waiting and any(track.index):
                    model.close(track, f, other, filled=False)
        except Refused:
            result = "refused"
    if leave:
        result = "boom" if leave["how"] == "boom" else "left"
    nest = None
    if inner is not None:
        nest = inner[0] if op["nest"] and run_inside(model, inner, op, items, lengths, closing=op["nest"]) else None
    for rank in model.ranks:
        model.act(rank, ["over", f, items[rank], op["sized"], nest, leave and leave["how"] == "break" and leave["item"]], result)
    check = lanes[0] if uneven and result == "end" and settings["tail"] != "carry" and model.has_buffers(lanes[0]) else None
    model.look(same_buffers=check)


def run_inside(model: Model, inner, op, items, lengths, *, closing: bool) -> bool:
    g, lane = inner
    if any(one == g for one, _ in model.waiting) or any(
        one == g and other != lane and t.is_open for (one, other), t in model.tracks.items()
    ):
        closing = False
    track = model.track(g, lane)
    for item in range(lengths[0]):
        size = model.size(g, track.window)
        for rank in model.ranks:
            mb = model.micro_batch(g, lane, op, "ok")
            items[rank][item].append([g, lane, mb])
            model.call(track, g, lane, rank, mb)
        if track.index[0] == size:
            model.close(track, g, lane, filled=True)
    if closing and track.index[0]:
        model.close(track, g, lane, filled=False)
    return closing


def run_windows(model: Model, track, f, lane, op, queues, items, lengths, *, closing: bool) -> bool:
    """Window by window, until nobody has anything left; whether ranks brought different numbers to one."""
    uneven = False
    while True:
        size, filled = model.size(f, track.window), False
        for rank in model.ranks:
            while queues[rank] and track.index[rank] < size:
                item, event, out = queues[rank].pop(0)
                boundary = track.index[rank] + 1 == size or item + 1 == lengths[rank]
                if event.startswith("backward") and boundary:
                    event = "raise_late"
                mb = model.micro_batch(f, lane, op, event)
                mb["out"] = out
                items[rank][item].append([f, lane, mb])
                model.call(track, f, lane, rank, mb)
            filled |= track.index[rank] == size
        uneven |= not any(track.void) and len({held.num for held in track.held}) > 1
        if not filled:
            break
        model.close(track, f, lane, filled=True)
    if closing:
        if any(track.index):
            model.close(track, f, lane, filled=False)
        if not track.is_open:
            track.opened = [False] * model.num_ranks
    return uneven
