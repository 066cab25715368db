"""Calls outside of loops: windows, boundaries that fail, windows that clash."""

from __future__ import annotations

from tests.programs.model import Model, Refused


def do_calls(model: Model, op: dict) -> None:
    """Each rank closes the same number of windows, and goes a way of its own into the next."""
    f, lane = op["f"], model.lane_of(op["f"], op["lane"])
    if not model.is_free(f, lane):
        return
    first = (f, lane) not in model.tracks or (f, lane) in model.waiting
    extras = [op["extras"][rank] for rank in model.ranks]
    if not op["windows"]:
        least = 1 if first else 0
        extras = [max(least, extra) for extra in extras]
    track = model.track(f, lane)
    faults = {(fault["rank"], fault["at"]): fault["event"] for fault in op["faults"]}
    calls, results = [[] for _ in model.ranks], [[] for _ in model.ranks]

    def go(rank: int, to: int) -> None:
        while track.index[rank] < to:
            event = faults.get((rank, len(calls[rank])), "ok")
            boundary = track.index[rank] + 1 == model.size(f, track.window)
            if event.startswith("backward") and boundary:
                event = "raise_late"
            mb = model.micro_batch(f, lane, op, event)
            calls[rank].append(mb)
            loss = model.call(track, f, lane, rank, mb)
            results[rank].append({
                "loss": loss, "stepped": False,
                "progress": track.seen(rank, model.size(f, track.window)),
            })  # fmt: skip

    for _ in range(op["windows"]):
        for rank in model.ranks:
            go(rank, model.size(f, track.window))
        before, refused = track.updates, False
        try:
            model.close(track, f, lane, filled=True)
        except Refused:
            refused = True
        for rank in model.ranks:
            results[rank][-1] |= {"progress": track.seen(rank, 0), "stepped": track.updates > before}
            if refused:
                results[rank][-1]["loss"] = "refused"
    size = model.size(f, track.window)
    ahead = [min(max(track.index[rank], extras[rank]), size - 1) for rank in model.ranks]
    if model.has_buffers(lane) and any(a or o for a, o in zip(ahead, track.opened, strict=True)):
        if size == 1:
            ahead = [0] * model.num_ranks
        else:  # buffers are broadcast as a window opens: all open it
            ahead = [a if o else max(1, a) for a, o in zip(ahead, track.opened, strict=True)]
    if first and not op["windows"] and not all(a > i for a, i in zip(ahead, track.index, strict=True)):
        lane = model.functions[f]["lanes"].index(lane)  # no longer the first that has not been called
        return do_calls(model, {**op, "lane": lane, "windows": 1})  # its first call is on every rank
    for rank in model.ranks:
        go(rank, ahead[rank])
        model.act(rank, ["calls", f, lane, calls[rank]], results[rank])
    model.look()


def do_boundary_fails(model: Model, op: dict) -> None:
    """Every rank's backward fails at the same boundary; or one rank's, which ends the program."""
    f, lane = op["f"], model.lane_of(op["f"], op["lane"])
    if not model.is_free(f, lane):
        return
    track = model.track(f, lane)
    one = op["rank"] if op["alone"] and op["rank"] < model.num_ranks > 1 else None
    for rank in model.ranks:
        calls, results = [], []
        while track.index[rank] + 1 < model.size(f, track.window):
            calls.append(model.micro_batch(f, lane, op, "ok"))
            loss = model.call(track, f, lane, rank, calls[-1])
            results.append({"loss": loss, "stepped": False, "progress": track.seen(rank, model.size(f, track.window))})
        event = op["event"] if one is None or rank == one else "ok"
        calls.append(model.micro_batch(f, lane, op, event))
        result = model.call(track, f, lane, rank, calls[-1])
        if event == "ok":
            result = "?"
        results.append({"loss": result, "stepped": False, "progress": track.seen(rank, model.size(f, track.window))})
        model.act(rank, ["calls", f, lane, calls], results)
    model.ended = one is not None
    model.look()


def do_clash(model: Model, op: dict) -> None:
    """A second window on parameters that are in an open one is refused, and harms nothing."""
    f, g = op["f"], op["g"]
    lane = model.lane_of(g, op["lane"])
    mine, other = model.tracks.get((f, lane)), model.tracks.get((g, lane))
    if f == g or mine is None or (f, lane) in model.waiting or (g, lane) in model.waiting or not all(mine.index):
        return
    if any(k == g for k, _ in model.waiting) or (other is not None and (other.is_open or any(other.opened))):
        return
    track = model.track(g, lane)
    for rank in model.ranks:
        mb = model.micro_batch(g, lane, op, "ok")
        model.latest[rank][g] = g, lane
        progress = track.seen(rank, 0)
        model.act(rank, ["calls", g, lane, [mb]], [{"loss": "refused", "stepped": None, "progress": progress}])
    model.look()
