"""What a loop may do where it stands: be left early, or call another function inside."""

from __future__ import annotations

from tests.programs.micro_batches import FAILS, SKIPS, SPOILS
from tests.programs.model import Model


def leaving(model: Model, op, f, tracks, lengths, passed, faults, twice):
    """Leaving early, if all ranks have then closed the same number of windows."""
    leave, track = op["leave"], tracks[0]
    if leave is None or len(tracks) > 1 or twice or min(lengths) <= leave["item"] + 1:
        return None
    if leave["how"] == "boom" and any((rank, leave["item"]) in passed for rank in model.ranks):
        return None
    if any(event == "nan" for event in faults.values()):
        return None
    counts, opened = set(), set()
    for rank in model.ranks:
        index, window, calls, at = track.index[rank], track.window, 0, track.opened[rank]
        for item in range(leave["item"] + 1):
            if (rank, item) in passed:
                continue
            event = faults.get((rank, calls), "ok")
            if event in SKIPS | SPOILS and not model.functions[f]["skip"]:
                event = "raise"
            if item == leave["item"] and leave["how"] == "boom":
                event = "raise"
            calls, at = calls + 1, True
            index = 0 if event in FAILS else index + 1
            if index == model.size(f, window):
                index, window, at = 0, window + 1, False
        counts.add(window)
        opened.add(at)
    return leave if len(counts) == 1 and len(opened) == 1 else None


def another_inside(model: Model, op, f, lanes, tracks, lengths, passed, faults, leave):
    """Another function that the same loop calls for each item, without an `over` of its own."""
    g = op["inner"]
    if g is None or g == f or leave or passed or faults or len(set(lengths)) > 1 or not lengths[0]:
        return None
    if model.functions[f]["tail"] == "carry" or any(len(set(t.index)) > 1 for t in tracks):
        return None
    lane = model.lane_of(g, 0)
    if lane in lanes or not model.is_free(g, lane):
        return None
    watches = {model.functions[f]["watch"], model.functions[g]["watch"]}
    if any(m in watches for one in (lane, *lanes) for m in model.lanes[one]["models"]):
        return None  # whose update comes first would matter
    track = model.tracks.get((g, lane))
    if track is not None and (len(set(track.index)) > 1 or len(set(track.opened)) > 1):
        return None
    return g, lane
