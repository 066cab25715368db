"""What a program of gradsync calls should do: all ranks in one process, float64, plain autograd, nothing of gradsync.

A program is plain data (dicts, lists, numbers), as `programs()` in test_programs.py draws it. `Model(program)` goes
through it, leaves out what the contract does not allow where it stands, and writes down for each rank

- a script: the calls that this rank makes, and nothing else;
- what must be seen after each of its actions.

A call's micro-batch is a dict: `seed` and `rows` make its data, `event` is what happens in the body:
"ok", "nan", "skip" / "skip_late" (a type in `skip`, before or after the forward), "raise" / "raise_late" (an error that
the loop catches), "backward" / "backward_deep" (an error in the backward, at its beginning or half way through), "spoil" / "spoil_deep"
(a type in `skip` there, which drops the whole window on every rank).
"""

from __future__ import annotations

import torch
from torch import nn

LEARNING_RATE = 0.02
FAILS = {"raise", "raise_late", "backward", "backward_deep"}
SKIPS = {"skip", "skip_late"}
SPOILS = {"spoil", "spoil_deep"}


class Boom(Exception):
    """What a body raises."""


class SkipMe(Exception):
    """What a body raises that may be skipped."""


class Trap(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ctx.error


class Net(nn.Module):
    """Three numbers in, three out; perhaps a parameter that nobody uses, and a buffer that counts what came."""

    def __init__(self, seed: int, unused: bool, buffers: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()
        if unused:
            self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        if buffers:
            self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, x, trap=None):
        if hasattr(self, "seen"):
            self.seen += x.detach().abs().sum()
        h = torch.tanh(self.first(x))
        return self.last(h if trap is None else Trap.apply(h, trap))


def data(micro_batch: dict) -> torch.Tensor:
    """The same wherever it is asked for."""
    generator = torch.Generator().manual_seed(micro_batch["seed"])
    return torch.randn(micro_batch["rows"], 3, generator=generator, dtype=torch.float64)


def loss_of(y: torch.Tensor, kind: str) -> torch.Tensor:
    return y.square().sum() + 0.1 * y.sum() if kind == "sum" else y.square().mean() + 0.1 * y.mean()


def forward(parameters: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`Net` once more, on plain tensors."""
    tensors = [p for p in parameters if p.numel() != 2]
    w, b, v, c = tensors
    return torch.tanh(x @ w.T + b) @ v.T + c


class Held:
    """What one rank holds of one window."""

    def __init__(self, num_parameters: int) -> None:
        self.num = 0
        self.count = 0.0
        self.losses: list[float] = []
        self.grads: list[torch.Tensor | None] = [None] * num_parameters

    def copy(self) -> Held:
        twin = Held(0)
        twin.num, twin.count, twin.losses, twin.grads = self.num, self.count, list(self.losses), list(self.grads)
        return twin

    def add(self, loss: float, count: float, grads) -> None:
        self.num, self.count = self.num + 1, self.count + count
        self.losses.append(loss)
        self.grads = [a if b is None else b if a is None else a + b for a, b in zip(self.grads, grads, strict=True)]


class Track:
    """The windows of one function on one lane (models and their optimizer)."""

    def __init__(self, ranks: int, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self.ranks = range(ranks)
        self.window = self.updates = self.skipped = 0
        self.micro_steps, self.dropped = [0] * ranks, [0] * ranks
        self.index = [0] * ranks
        self.opened = [False] * ranks
        self.void = [False] * ranks  # a backward failed with a type in `skip`
        self.held = [Held(num_parameters) for _ in self.ranks]
        self.loss: list[float | None | str] = [None] * ranks  # "?" where it is not defined
        self.grad_norm: float | None | str = None

    def drop(self, rank: int) -> None:
        self.index[rank], self.void[rank] = 0, False
        self.held[rank] = Held(self._num_parameters)

    @property
    def is_open(self) -> bool:
        return any(self.index) or any(held.num for held in self.held)

    def snapshot(self) -> dict:
        return {
            "window": self.window, "updates": self.updates, "skipped": self.skipped,
            "micro_steps": list(self.micro_steps), "dropped": list(self.dropped), "index": list(self.index),
            "void": list(self.void), "opened": list(self.opened), "held": [held.copy() for held in self.held],
        }  # fmt: skip

    def restore(self, state: dict) -> None:
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)
        self.held = [held.copy() for held in state["held"]]
        self.loss, self.grad_norm = ["?"] * len(self.ranks), "?"

    def seen(self, rank: int, size: int) -> dict:
        return {
            "micro_steps": self.micro_steps[rank], "updates": self.updates, "window": self.window,
            "index": self.index[rank], "skipped": self.skipped, "dropped": self.dropped[rank], "replays": 0,
            "size": size if self.index[rank] else None, "loss": self.loss[rank], "grad_norm": self.grad_norm,
        }  # fmt: skip


class Refused(Exception):
    """The window ended in an error on every rank."""


class Model:
    """Goes through a program."""

    def __init__(self, program: dict) -> None:
        self.program = program
        self.num_ranks = program["ranks"]
        self.ranks = range(self.num_ranks)
        self.lanes, self.functions = program["lanes"], program["functions"]
        self.nets = [
            [p.detach().clone().requires_grad_() for p in Net(100 + i, m["unused"], m["buffers"]).parameters()]
            for i, m in enumerate(program["models"])
        ]
        self.momenta: list = [[None] * len(self.of(i)) for i in range(len(self.lanes))]
        self.rates = [LEARNING_RATE] * len(self.lanes)
        self.seen_updates: list[list] = [[] for _ in self.lanes]
        self.tracks: dict[tuple[int, int], Track] = {}  # in the order of their first calls
        self.waiting: set[tuple[int, int]] = set()
        self.latest: list[dict[int, tuple[int, int]]] = [{} for _ in self.ranks]  # by rank: what was called last
        self.slots: dict[tuple[int, int], list] = {}
        self.slots_latest: dict[tuple[int, int], list] = {}
        self.scripts: list[list] = [[] for _ in self.ranks]
        self.expected: list[list] = [[] for _ in self.ranks]
        self.num_calls = self.seed = self.num_windows = self.num_faults = 0
        self.ended = False  # after an action that leaves the replicas apart, or the program refused
        for op in program["ops"]:
            if not self.ended:
                getattr(self, "do_" + op["do"])(op)
            if op.get("then") and not self.ended:  # right after it, for what it has left open
                f = 1 - op["f"] if op["then"] == "reset_other" else op["f"]
                getattr(self, "do_" + op["then"].partition("_")[0])({"f": f, "slot": 0, "torn": False, "all": True})

    # -- words ------------------------------------------------------------------------------------------------------

    def of(self, lane: int) -> list[torch.Tensor]:
        return [p for model in self.lanes[lane]["models"] for p in self.nets[model]]

    def size(self, f: int, window: int) -> int:
        steps = self.functions[f]["steps"]
        return steps[window % len(steps)]

    def lane_of(self, f: int, choice: int) -> int:
        """One that has been called, or else the first that has not: first calls come in order."""
        lanes = self.functions[f]["lanes"]
        called = [lane for lane in lanes if (f, lane) in self.tracks and (f, lane) not in self.waiting]
        return lanes[choice % min(len(lanes), len(called) + 1)]

    def track(self, f: int, lane: int) -> Track:
        key = (f, lane)
        self.waiting.discard(key)
        if key not in self.tracks:
            self.tracks[key] = Track(self.num_ranks, len(self.of(lane)))
        return self.tracks[key]

    def is_free(self, f: int | None, lane: int) -> bool:
        """Whether no other function has a window open there."""
        return not any(t.is_open for (g, other), t in self.tracks.items() if other == lane and g != f)

    def needs_all(self, lane: int) -> bool:
        """Whether DDP insists that each window uses each parameter, or may keep the traces of a discarded one."""
        return any(self.program["models"][m]["wrap"] != "bare" for m in self.lanes[lane]["models"])

    def has_buffers(self, lane: int) -> bool:
        return any(self.program["models"][m]["buffers"] for m in self.lanes[lane]["models"])

    def micro_batch(self, f: int | None, lane: int, op: dict, event: str, kind: str | None = None) -> dict:
        self.seed += 1
        settings = self.functions[f] if f is not None else {"skip": False, "nonfinite": "step", "kind": kind}
        if event in SKIPS | SPOILS and not settings["skip"]:
            event = "raise"
        if event == "nan" and settings["nonfinite"] == "step":
            event = "ok"
        counts = op.get("counts") or [1]
        uses = list(range(len(self.lanes[lane]["models"])))
        if op.get("part") and len(uses) > 1 and not self.needs_all(lane):
            uses = [self.seed % len(uses)]
        return {
            "seed": self.seed, "rows": 1 + self.seed * 7 % 4, "event": event, "uses": uses,
            "count": counts[self.seed % len(counts)], "kind": settings["kind"], "out": False,
        }  # fmt: skip

    def gradient(self, f: int | None, lane: int, mb: dict) -> tuple[float, list]:
        x, total = data(mb), 0.0
        watch = None if f is None else self.functions[f]["watch"]
        for place in mb["uses"]:
            y = forward(self.nets[self.lanes[lane]["models"][place]], x)
            total = total + loss_of(y if watch is None else forward(self.nets[watch], y), mb["kind"])
        if mb["event"] == "nan":
            total = total * float("nan")
        return total.item(), list(torch.autograd.grad(total, self.of(lane), allow_unused=True))

    def act(self, rank: int, action: list, result: object) -> None:
        self.scripts[rank].append(action)
        self.expected[rank].append({"result": result})

    def look(self, *, same_buffers: int | None = None) -> None:
        """What each rank must see after its last action."""
        params = [[p.detach().flatten().tolist() for p in self.of(lane)] for lane in range(len(self.lanes))]
        updates, self.seen_updates = self.seen_updates, [[] for _ in self.lanes]
        for rank in self.ranks:
            progress = {}
            for f, key in self.latest[rank].items():
                progress[f] = self.tracks[key].seen(rank, self.size(f, self.tracks[key].window))
            self.expected[rank][-1] |= {
                "params": params, "updates": updates, "progress": progress, "same_buffers": same_buffers,
                "clean": [
                    not any(t.index[rank] or t.held[rank].num for (_, other), t in self.tracks.items() if other == lane)
                    for lane in range(len(self.lanes))
                ],
                "ended": self.ended,
            }  # fmt: skip

    # -- windows ----------------------------------------------------------------------------------------------------

    def call(self, track: Track, f: int, lane: int, rank: int, mb: dict) -> object:
        """One call on one rank, but for what happens at a boundary."""
        track.opened[rank] = True
        self.latest[rank][f] = f, lane
        self.num_calls += 1
        if mb["event"] in FAILS:
            self.num_faults += 1
            track.drop(rank)
            return "boom"
        loss = None
        if mb["event"] in SKIPS:
            self.num_faults += 1
            track.dropped[rank] += 1
        elif mb["event"] in SPOILS:
            self.num_faults += 1
            track.dropped[rank] += 1
            track.held[rank] = Held(len(self.of(lane)))
            track.void[rank] = True
        else:
            loss, grads = self.gradient(f, lane, mb)
            track.held[rank].add(loss, mb["count"], grads)
        track.index[rank] += 1
        track.micro_steps[rank] += 1
        return loss

    def close(self, track: Track, f: int, lane: int, *, filled: bool, flushing: bool = False) -> None:
        """What all ranks hold becomes an update, or what the settings say."""
        settings = self.functions[f]
        if not filled and not flushing and settings["tail"] == "carry":
            return
        self.num_windows += 1
        kind, held = settings["kind"], track.held
        for rank in self.ranks:
            mine = held[rank]
            divisor = mine.count if kind == "sum" else mine.num
            track.loss[rank] = None if not mine.num else sum(mine.losses) / divisor if divisor else "?"
        total = sum(h.count for h in held) if kind == "sum" else sum(h.num for h in held)
        stepped = finite = True
        if any(track.void):
            track.loss = ["?"] * self.num_ranks
        if any(track.void) or not sum(h.num for h in held) or not total or (not filled and settings["tail"] == "drop"):
            stepped, track.grad_norm = False, None
        else:
            whole = Held(len(self.of(lane)))
            for h in held:
                whole.add(0.0, 0.0, h.grads)
            grads = [None if g is None else g / total for g in whole.grads]
            finite = all(bool(g.isfinite().all()) for g in grads if g is not None)
            norm = torch.stack([g.norm() for g in grads if g is not None]).norm() if any(
                g is not None for g in grads) else torch.zeros(())
            track.grad_norm = float(norm) if settings["clip"] else None
            if settings["clip"]:
                grads = [None if g is None else g * min(1.0, settings["clip"] / (float(norm) + 1e-6)) for g in grads]
            stepped = finite or settings["nonfinite"] == "step"
            if stepped:
                self.update(lane, grads)
                if self.lanes[lane]["decay"]:
                    self.rates[lane] *= 0.9
        for rank in self.ranks:
            track.drop(rank)
            track.opened[rank] = False
        track.window += 1
        if stepped:
            track.updates += 1
        else:
            track.skipped += 1
        if not finite and settings["nonfinite"] == "raise":
            track.grad_norm = "?"
            raise Refused

    def update(self, lane: int, grads) -> None:
        self.seen_updates[lane].append([None if g is None else g.flatten().tolist() for g in grads])
        momentum, buffers = self.lanes[lane]["momentum"], self.momenta[lane]
        with torch.no_grad():
            for place, (p, g) in enumerate(zip(self.of(lane), grads, strict=True)):
                if g is not None:
                    buffers[place] = g if buffers[place] is None else momentum * buffers[place] + g
                    p -= self.rates[lane] * (buffers[place] if momentum else g)

    # -- actions ----------------------------------------------------------------------------------------------------

    def do_calls(self, op: dict) -> None:
        """Each rank closes the same number of windows, and goes a way of its own into the next."""
        f, lane = op["f"], self.lane_of(op["f"], op["lane"])
        if not self.is_free(f, lane):
            return
        first = (f, lane) not in self.tracks or (f, lane) in self.waiting
        extras = [op["extras"][rank] for rank in self.ranks]
        if not op["windows"]:
            least = 1 if first else 0
            extras = [max(least, extra) for extra in extras]
        track = self.track(f, lane)
        faults = {(fault["rank"], fault["at"]): fault["event"] for fault in op["faults"]}
        calls, results = [[] for _ in self.ranks], [[] for _ in self.ranks]

        def go(rank: int, to: int) -> None:
            while track.index[rank] < to:
                event = faults.get((rank, len(calls[rank])), "ok")
                boundary = track.index[rank] + 1 == self.size(f, track.window)
                if event.startswith("backward") and boundary:
                    event = "raise_late"
                mb = self.micro_batch(f, lane, op, event)
                calls[rank].append(mb)
                loss = self.call(track, f, lane, rank, mb)
                results[rank].append({
                    "loss": loss, "stepped": False,
                    "progress": track.seen(rank, self.size(f, track.window)),
                })  # fmt: skip

        for _ in range(op["windows"]):
            for rank in self.ranks:
                go(rank, self.size(f, track.window))
            before, refused = track.updates, False
            try:
                self.close(track, f, lane, filled=True)
            except Refused:
                refused = True
            for rank in self.ranks:
                results[rank][-1] |= {"progress": track.seen(rank, 0), "stepped": track.updates > before}
                if refused:
                    results[rank][-1]["loss"] = "refused"
        size = self.size(f, track.window)
        ahead = [min(max(track.index[rank], extras[rank]), size - 1) for rank in self.ranks]
        if self.has_buffers(lane) and any(a or o for a, o in zip(ahead, track.opened, strict=True)):
            if size == 1:
                ahead = [0] * self.num_ranks
            else:  # buffers are broadcast as a window opens: all open it
                ahead = [a if o else max(1, a) for a, o in zip(ahead, track.opened, strict=True)]
        if first and not op["windows"] and not all(a > i for a, i in zip(ahead, track.index, strict=True)):
            lane = self.functions[f]["lanes"].index(lane)  # no longer the first that has not been called
            return self.do_calls({**op, "lane": lane, "windows": 1})  # its first call is on every rank
        for rank in self.ranks:
            go(rank, ahead[rank])
            self.act(rank, ["calls", f, lane, calls[rank]], results[rank])
        self.look()

    def do_boundary_fails(self, op: dict) -> None:
        """Every rank's backward fails at the same boundary; or one rank's, which ends the program."""
        f, lane = op["f"], self.lane_of(op["f"], op["lane"])
        if not self.is_free(f, lane):
            return
        track = self.track(f, lane)
        one = op["rank"] if op["alone"] and op["rank"] < self.num_ranks > 1 else None
        for rank in self.ranks:
            calls, results = [], []
            while track.index[rank] + 1 < self.size(f, track.window):
                calls.append(self.micro_batch(f, lane, op, "ok"))
                loss = self.call(track, f, lane, rank, calls[-1])
                results.append({"loss": loss, "stepped": False, "progress": track.seen(rank, self.size(f, track.window))})
            event = op["event"] if one is None or rank == one else "ok"
            calls.append(self.micro_batch(f, lane, op, event))
            result = self.call(track, f, lane, rank, calls[-1])
            if event == "ok":
                result = "?"
            results.append({"loss": result, "stepped": False, "progress": track.seen(rank, self.size(f, track.window))})
            self.act(rank, ["calls", f, lane, calls], results)
        self.ended = one is not None
        self.look()

    def do_over(self, op: dict) -> None:
        """Data of a length of its own on each rank."""
        f, settings = op["f"], self.functions[op["f"]]
        lanes = [self.lane_of(f, op["lane"])]
        if op["all_lanes"] and len(settings["lanes"]) > 1:
            lanes = list(settings["lanes"])
        if not all(self.is_free(f, lane) for lane in lanes):
            return
        known = [(f, lane) in self.tracks and (f, lane) not in self.waiting for lane in lanes]
        named = settings["named"] and not self.waiting.intersection((f, lane) for lane in lanes)
        lengths = [op["lengths"][rank] for rank in self.ranks]
        passed = {(p["rank"], p["item"]) for p in op["passed"]}  # items without a call
        faults = {(fault["rank"], fault["at"]): fault["event"] for fault in op["faults"]}
        twice = op["twice"] and len(lanes) == 1
        inner = None
        if len(lanes) > 1:
            # Where ranks run out in a loop of several windows, these must be in step with each other.
            old = [self.tracks[f, lane] for lane in lanes if (f, lane) in self.tracks]
            if any(t.is_open or any(t.opened) for t in old) or len({t.window for t in old} | ({0} if len(old) < len(lanes) else set())) > 1:
                return
            faults = {key: event for key, event in faults.items() if event in SKIPS and settings["skip"]}
            passed = set()
        if twice:
            passed = set()
        some = [any((rank, item) not in passed for item in range(lengths[rank])) for rank in self.ranks]
        if not any(some) and not all(known):
            return  # nothing to know it by
        several = sum(g == f and (g, lane) not in self.waiting for g, lane in self.tracks) > len(lanes)
        if not all(some) and (several or len(lanes) > 1 or not (all(known) or named)):
            for rank in self.ranks:  # each rank gets an item, so that each knows the models
                lengths[rank] = max(1, lengths[rank])
                passed -= {(rank, 0)}
        fresh = not any(g == f and (g, lane) not in self.waiting for g, lane in self.tracks)
        tracks = [self.track(f, lane) for lane in lanes]
        if fresh and named and len(lanes) == 1:
            for rank in self.ranks:  # one that never calls gets to know its models as the data ends
                self.latest[rank].setdefault(f, (f, lanes[0]))
        leave = self.leave(op, f, tracks, lengths, passed, faults, twice)
        inner = self.inner(op, f, lanes, tracks, lengths, passed, faults, leave)
        items = [[[] for _ in range(length)] for length in lengths]
        result, uneven = "end", False
        for lane, track in zip(lanes, tracks, strict=True):
            queues = []
            for rank in self.ranks:
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
                uneven |= self.run(track, f, lane, op, queues, items, lengths, closing=leave is None)
            except Refused:
                result = "refused"
        if leave is None and result == "end" and settings["tail"] != "carry":
            try:  # the data's end closes what other calls of the function have left open
                for (g, other), track in self.tracks.items():
                    if g == f and other not in lanes and (g, other) not in self.waiting and any(track.index):
                        self.close(track, f, other, filled=False)
            except Refused:
                result = "refused"
        if leave:
            result = "boom" if leave["how"] == "boom" else "left"
        nest = None
        if inner is not None:
            nest = inner[0] if op["nest"] and self.run_inner(inner, op, items, lengths, closing=op["nest"]) else None
        for rank in self.ranks:
            self.act(rank, ["over", f, items[rank], op["sized"], nest, leave and leave["how"] == "break" and leave["item"]], result)
        check = lanes[0] if uneven and result == "end" and settings["tail"] != "carry" and self.has_buffers(lanes[0]) else None
        self.look(same_buffers=check)

    def run(self, track, f, lane, op, queues, items, lengths, *, closing: bool) -> bool:
        """Window by window, until nobody has anything left; whether ranks brought different numbers to one."""
        uneven = False
        while True:
            size, filled = self.size(f, track.window), False
            for rank in self.ranks:
                while queues[rank] and track.index[rank] < size:
                    item, event, out = queues[rank].pop(0)
                    boundary = track.index[rank] + 1 == size or item + 1 == lengths[rank]
                    if event.startswith("backward") and boundary:
                        event = "raise_late"
                    mb = self.micro_batch(f, lane, op, event)
                    mb["out"] = out
                    items[rank][item].append([f, lane, mb])
                    self.call(track, f, lane, rank, mb)
                filled |= track.index[rank] == size
            uneven |= not any(track.void) and len({held.num for held in track.held}) > 1
            if not filled:
                break
            self.close(track, f, lane, filled=True)
        if closing:
            if any(track.index):
                self.close(track, f, lane, filled=False)
            if not track.is_open:
                track.opened = [False] * self.num_ranks
        return uneven

    def leave(self, op, f, tracks, lengths, passed, faults, twice):
        """Leaving early, if all ranks have then closed the same number of windows."""
        leave, track = op["leave"], tracks[0]
        if leave is None or len(tracks) > 1 or twice or min(lengths) <= leave["item"] + 1:
            return None
        if leave["how"] == "boom" and any((rank, leave["item"]) in passed for rank in self.ranks):
            return None
        if any(event == "nan" for event in faults.values()):
            return None
        counts, opened = set(), set()
        for rank in self.ranks:
            index, window, calls, at = track.index[rank], track.window, 0, track.opened[rank]
            for item in range(leave["item"] + 1):
                if (rank, item) in passed:
                    continue
                event = faults.get((rank, calls), "ok")
                if event in SKIPS | SPOILS and not self.functions[f]["skip"]:
                    event = "raise"
                if item == leave["item"] and leave["how"] == "boom":
                    event = "raise"
                calls, at = calls + 1, True
                index = 0 if event in FAILS else index + 1
                if index == self.size(f, window):
                    index, window, at = 0, window + 1, False
            counts.add(window)
            opened.add(at)
        return leave if len(counts) == 1 and len(opened) == 1 else None

    def inner(self, op, f, lanes, tracks, lengths, passed, faults, leave):
        """Another function that the same loop calls for each item, without an `over` of its own."""
        g = op["inner"]
        if g is None or g == f or leave or passed or faults or len(set(lengths)) > 1 or not lengths[0]:
            return None
        if self.functions[f]["tail"] == "carry" or any(len(set(t.index)) > 1 for t in tracks):
            return None
        lane = self.lane_of(g, 0)
        if lane in lanes or not self.is_free(g, lane):
            return None
        watches = {self.functions[f]["watch"], self.functions[g]["watch"]}
        if any(m in watches for one in (lane, *lanes) for m in self.lanes[one]["models"]):
            return None  # whose update comes first would matter
        track = self.tracks.get((g, lane))
        if track is not None and (len(set(track.index)) > 1 or len(set(track.opened)) > 1):
            return None
        return g, lane

    def run_inner(self, inner, op, items, lengths, *, closing: bool) -> bool:
        g, lane = inner
        if any(one == g for one, _ in self.waiting) or any(
            one == g and other != lane and t.is_open for (one, other), t in self.tracks.items()
        ):
            closing = False
        track = self.track(g, lane)
        for item in range(lengths[0]):
            size = self.size(g, track.window)
            for rank in self.ranks:
                mb = self.micro_batch(g, lane, op, "ok")
                items[rank][item].append([g, lane, mb])
                self.call(track, g, lane, rank, mb)
            if track.index[0] == size:
                self.close(track, g, lane, filled=True)
        if closing and track.index[0]:
            self.close(track, g, lane, filled=False)
        return closing

    def do_flush(self, op: dict) -> None:
        f, result = op["f"], "end"
        if any(g == f for g, _ in self.waiting):
            return
        try:
            for (g, lane), track in self.tracks.items():
                if g == f and any(track.index):
                    self.close(track, f, lane, filled=False, flushing=True)
        except Refused:
            result = "refused"
        for rank in self.ranks:
            self.act(rank, ["flush", f], result)
        self.look()

    def do_reset(self, op: dict) -> None:
        f = op["f"]
        if any(g == f for g, _ in self.waiting):
            return
        for rank in self.ranks:
            if op["all"] or rank in op["who"]:
                for (g, _), track in self.tracks.items():
                    if g == f:
                        track.drop(rank)
                self.act(rank, ["reset", f], "end")
            else:
                self.act(rank, ["nothing"], "end")
        self.look()

    def do_save(self, op: dict) -> None:
        f = op["f"]
        self.slots[f, op["slot"]] = [(key, t.snapshot()) for key, t in self.tracks.items() if key[0] == f]
        self.slots_latest[f, op["slot"]] = [latest.get(f) for latest in self.latest]
        for rank in self.ranks:
            self.act(rank, ["save", f, op["slot"]], "end")
        self.look()

    def do_load(self, op: dict) -> None:
        f = op["f"]
        state = self.slots.get((f, op["slot"]))
        keys = [key for key in self.tracks if key[0] == f]
        if not state:
            return self.do_save(op)
        if [key for key, _ in state] != keys[: len(state)] or any(key in self.waiting for key in keys):
            return
        if not all(self.is_free(f, lane) for _, lane in keys):
            return
        torn = op["torn"] and self.num_ranks > 1 and keys and any(s["window"] != self.tracks[key].window for key, s in state)
        if torn:
            for rank in self.ranks:  # one rank alone goes back: the next time that they meet, all are told
                self.act(rank, ["load", f, op["slot"]] if rank == 0 else ["nothing"], "end")
                self.expected[rank][-1]["ended"] = True
                self.act(rank, ["flush", f], "refused")
            self.ended = True
            return self.look()
        latest = self.slots_latest[f, op["slot"]]
        for key in keys:  # one that was called first after the state was saved begins anew
            self.tracks[key] = Track(self.num_ranks, len(self.of(key[1])))
        for key, saved in state:
            self.tracks[key].restore(saved)
        for rank in self.ranks:
            if latest[rank] is not None:
                self.latest[rank][f] = latest[rank]
            self.act(rank, ["load", f, op["slot"]], "end")
        self.look()

    def do_resume(self, op: dict) -> None:
        """As a new process would: the function anew, and the state loaded before its first call."""
        f = op["f"]
        keys = [key for key in self.tracks if key[0] == f]
        if not all(self.is_free(f, lane) for _, lane in keys):
            return
        for key in keys:
            self.tracks[key].restore(self.tracks[key].snapshot())
            self.waiting.add(key)
        for rank in self.ranks:
            self.act(rank, ["resume", f], "end")
        self.look()

    def do_clash(self, op: dict) -> None:
        """A second window on parameters that are in an open one is refused, and harms nothing."""
        f, g = op["f"], op["g"]
        lane = self.lane_of(g, op["lane"])
        mine, other = self.tracks.get((f, lane)), self.tracks.get((g, lane))
        if f == g or mine is None or (f, lane) in self.waiting or (g, lane) in self.waiting or not all(mine.index):
            return
        if any(k == g for k, _ in self.waiting) or (other is not None and (other.is_open or any(other.opened))):
            return
        track = self.track(g, lane)
        for rank in self.ranks:
            mb = self.micro_batch(g, lane, op, "ok")
            self.latest[rank][g] = g, lane
            progress = track.seen(rank, 0)
            self.act(rank, ["calls", g, lane, [mb]], [{"loss": "refused", "stepped": None, "progress": progress}])
        self.look()

    def do_cross(self, op: dict) -> None:
        """Ranks at different places are all told so."""
        pair = [
            f for f in range(len(self.functions))
            if any(key[0] == f for key in self.tracks) and not any(key[0] == f for key in self.waiting)
        ]  # fmt: skip
        if self.num_ranks == 1 or len(pair) < 2:
            return
        for rank in self.ranks:
            self.act(rank, ["flush", pair[0] if rank else pair[1]], "refused")
        self.ended = True
        self.look()

    def do_sync(self, op: dict) -> None:
        """A `sync_every` loop between the others."""
        lane, kind = op["lane"] % len(self.lanes), op["kind"]
        if not self.is_free(None, lane) or any(any(t.opened) for (_, other), t in self.tracks.items() if other == lane):
            return
        lengths = [op["lengths"][rank] for rank in self.ranks]
        if op["endless"]:
            lengths = [lengths[0]] * self.num_ranks
        if any(lengths):
            lengths = [max(1, length) for length in lengths]
        steps, leave, plain = op["steps"], op["leave"], op["plain"] and kind == "mean"
        if leave is not None and (op["endless"] or min(lengths) <= leave + 1):
            leave = None
        if plain or self.needs_all(lane):
            op = {**op, "part": False}
        items = [[self.micro_batch(None, lane, op, "ok", kind) for _ in range(length)] for length in lengths]
        start = number = 0
        while start < max(lengths):
            size = steps[number % len(steps)]
            whole, end = Held(len(self.of(lane))), start + size
            if leave is not None and leave < end - 1 or (op["endless"] and end > lengths[0]):
                break
            for rank in self.ranks:
                for mb in items[rank][start:end]:
                    loss, grads = self.gradient(None, lane, mb)
                    whole.add(loss, mb["count"], grads)
            total = whole.count if kind == "sum" else whole.num
            if plain:
                total = size * self.num_ranks
            self.update(lane, [None if g is None or not total else g / total for g in whole.grads])
            self.num_windows += 1
            start, number = end, number + 1
            if leave is not None and leave == end - 1:
                break
        for rank in self.ranks:
            mode = "endless" if op["endless"] else "sized" if op["sized"] else "unsized"
            self.act(rank, ["sync", lane, steps, items[rank], mode, leave, plain], "end")
        self.look()
