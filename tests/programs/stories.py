"""Random stories of one training run whose participants change between its loops, against float64 on one process.

A story is plain data: what holds the model, who trains, what the losses are, and a list of what is done. `tell` lives it twice on
each rank, by hand with everybody's data and with gradsync. It ends exact, or in a `GradSyncError` on every rank; the reference
comes first, and says which edits are possible where they stand.
"""

from __future__ import annotations

import random
import traceback
from threading import Lock, Thread

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradsync
from gradsync import GradSyncError, LossSum, accumulating
from tests.changes.edits import BY_NAME, backbone_and_head
from tests.changes.rule import NotExact, Outcome, Run, compare, layer, my_rank, world_size
from tests.support.ranks import GROUP_TIMEOUT
from tests.support.reference import micro_batch

WRAPS = {"bare": None, "ddp": {}, "find_unused": {"find_unused_parameters": True}, "static": {"static_graph": True},
         "views": {"gradient_as_bucket_view": True}, "fsdp2": None}  # fmt: skip
DTYPES = ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64", "number", "refilled"]
MOST = {"bool": 1, "uint8": 250, "int16": 30000, "float16": 60000, "bfloat16": 256}
SEEDING = Lock()  # torch's seed is everybody's
IMPOSSIBLE = (AttributeError, IndexError, KeyError, TypeError, ValueError)


# -- edits that are not in tests/changes ------------------------------------------------------------------------------


def unfrozen(run) -> None:
    for model in run.models:
        model.requires_grad_(True)


def all_but_the_head_frozen(run) -> None:
    run.model.requires_grad_(False)
    run.model.head.requires_grad_(True)


def optimizer_made_anew(run) -> None:
    run.optimizer = None
    run.optimizer = run.sgd(*run.models)


def function_made_anew(run) -> None:
    run.end()
    run._step = run._function()


def in_float64(run) -> None:
    for model in run.models:
        model.double()


def joined_by_another(run) -> None:
    if len(run.models) > 1:
        raise IndexError
    backbone_and_head(run)
    run.optimizer = run.sgd(*run.models)


def joined_by_one_that_shares(run) -> None:
    if len(run.models) > 1:
        raise IndexError
    one, two = backbone_and_head(run)
    two.body, two.inp, two.emb = one.body, one.inp, one.emb
    run.optimizer = run.sgd(one, two)


def only_the_last_model(run) -> None:
    run.models = run.models[-1:]
    run.model = run.models[0]


def temperature(run) -> None:
    if run.extra:
        raise IndexError
    run.extra["temperature"] = scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    run.scale = scale
    run.optimizer.add_param_group({"params": [scale]})


def a_second_group(run) -> None:
    """The process group ends, and there is another one."""
    if run.how == "reference" or not dist.is_initialized():
        return
    run.rewrap()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    run.num_groups += 1
    store = f"file://{run.store}-{run.num_groups}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)


OWN = [
    unfrozen, unfrozen, all_but_the_head_frozen, optimizer_made_anew, optimizer_made_anew, function_made_anew, in_float64,
    joined_by_another, joined_by_one_that_shares, only_the_last_model, temperature, a_second_group,
]  # fmt: skip
EDITS = BY_NAME | {one.__name__: one for one in OWN}
# What is sharded, or has a static graph, stays as it is, but for these.
ON_SHARDS = ["optimizer_made_anew", "function_made_anew", "optimizer_of_a_part"]
ON_STATIC = [*ON_SHARDS, "frozen", "unfrozen", "all_but_the_head_frozen", "copied"]
NOT_AT_RANDOM = {"taken_out_of_ddp", "sub_module_alone_bare"}  # which change what holds the model


def draw(number: int) -> dict:
    """A story, from its number alone."""
    rng = random.Random(number)
    ranks = rng.choice([1, 2, 2, 2, 3])
    wrap = rng.choice(["bare", "bare", "bare", *WRAPS]) if ranks > 1 else "bare"
    how = rng.choice(["accumulating", "accumulating", "sync_every"])
    edits = {"fsdp2": ON_SHARDS, "static": ON_STATIC}.get(wrap, [name for name in EDITS if name not in NOT_AT_RANDOM])
    if how == "sync_every":  # which is told of the model, and of no optimizer
        edits = [name for name in edits if name != "temperature"]
    story = {
        "number": number, "ranks": ranks, "wrap": wrap, "how": how, "steps": rng.randint(1, 3),
        "counts": rng.choice([None, None, *DTYPES]), "scaler": rng.random() < 0.25, "hooks": rng.random() < 0.3 and wrap != "fsdp2",
        "two": wrap not in {"fsdp2"} and rng.random() < 0.1, "ops": [],
    }  # fmt: skip
    for _ in range(rng.randint(2, 6)):
        story["ops"].append(draw_loop(rng, story))
        if not story["two"]:
            for _ in range(rng.choice([0, 1, 1, 2])):
                story["ops"].append({"do": rng.choice(edits), "rewrap": rng.random() < 0.6})
        else:
            story["ops"].append({"do": rng.choice(ON_SHARDS[:2]), "rewrap": False})
    story["ops"].append(draw_loop(rng, story))
    return story


def draw_loop(rng: random.Random, story: dict) -> dict:
    size, even = story["ranks"], rng.random() < 0.3
    lengths = [rng.randint(1, 7)] * size if even else [rng.randint(1, 7) for _ in range(size)]
    poison = [rng.randrange(size), rng.randrange(7)] if story["scaler"] and rng.random() < 0.3 else None
    return {"do": "loop", "lengths": lengths, "sized": rng.random() < 0.5, "poison": poison, "seed": rng.randrange(1000)}


# -- a life -----------------------------------------------------------------------------------------------------------


class Life(Run):
    """A run that trains in loops of lengths that differ by rank."""

    def __init__(self, how: str, story: dict, store: str, group=None) -> None:
        self.story, self.store, self.group = story, store, group
        self.num_groups = 0
        self.scale: nn.Parameter | None = None
        self.counter = torch.zeros(1, dtype=torch.int64)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, enabled=how != "reference")
        super().__init__(how, story["wrap"], story["steps"])
        if story["wrap"] == "fsdp2" and how != "reference":
            fully_shard(self.model)
            self.optimizer = self.sgd(self.model)
        self.drawn = 0

    def train(self, windows: int = 2) -> None:
        self.loop({"lengths": [windows * self.steps] * world_size(), "sized": True, "poison": None, "seed": 5})

    def loop(self, op: dict) -> None:
        """A loop over data of a length of its own on each rank."""
        hooked = self._hook() if self.story["hooks"] else {}
        if self.how == "reference":
            self._by_hand(op)
        else:
            self._with_gradsync(op)
        self.drawn += max(op["lengths"])
        for handles, calls, used in hooked.values():
            for one in handles:
                one.remove()
            if self.how != "reference" and self.wrap != "fsdp2" and used:
                mine = op["lengths"][my_rank()]
                if calls != [mine, mine]:
                    raise NotExact(f"hooks ran {calls} times for {mine} micro-batches")
        self.trace.append({name: _whole(p).double().clone() for name, p in self.tracked().items()})

    # -- the micro-batches

    def _data(self, op: dict, rank: int, i: int) -> tuple[torch.Tensor, int, bool]:
        x = micro_batch(rank, self.drawn + i)
        seed = op["seed"] + 7 * rank + 3 * i
        count = [0, 1, 1, 0, 2, MOST.get(self.story["counts"], 9)][seed % 6]
        return x, min(count, MOST.get(self.story["counts"], 9)), op["poison"] == [rank, i]

    def _loss(self, models, x: torch.Tensor, poisoned: bool) -> torch.Tensor:
        total = 0.0
        for model in models:
            y = model(x)
            total = total + y.square().mean() + y.sum() * 0.1
        if self.scale is not None:
            total = total * self.scale
        return total * float("inf") if poisoned else total

    def _count(self, count: int):
        kind = self.story["counts"]
        if kind == "number":
            return count
        if kind == "refilled":
            return self.counter.fill_(count)
        return torch.tensor(count, dtype=getattr(torch, kind))

    # -- two ways

    def _by_hand(self, op: dict) -> None:
        lengths = op["lengths"]
        for start in range(0, max(lengths), self.steps):
            places = [(r, i) for r, length in enumerate(lengths) for i in range(start, min(start + self.steps, length))]
            data = [self._data(op, *place) for place in places]
            over = len(data) if self.story["counts"] is None else sum(count for _, count, _ in data)
            losses = [self._loss(self.models, x, False) for x, _, _ in data]  # which says whether the model can still run
            if not over or any(poisoned for *_, poisoned in data):
                continue
            for loss in losses:
                (loss / over).backward()
            self._update()
            self._clear()

    def _with_gradsync(self, op: dict) -> None:
        rank = my_rank()
        homes = [self._home(model) for model in self.models]
        items = [self._data(op, rank, i) for i in range(op["lengths"][rank])]
        items = items if op["sized"] else iter(items)
        counted, scaled = self.story["counts"] is not None, self.story["scaler"]
        if self._step is not None:
            scaler = (self.scaler,) if scaled else ()
            for item in self._step.over(items):
                self._step(*homes, self.optimizer, *scaler, item)
            return
        for step, (x, count, poisoned) in gradsync.sync_every(homes[0] if len(homes) == 1 else homes, self.steps, items):
            loss = self._loss(homes, x, poisoned)
            step.backward(self.scaler.scale(loss) if scaled else loss, count=self._count(count) if counted else None)
            if step.last and not step.empty:
                if scaled:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                else:
                    self.optimizer.step()
            if step.last:
                self._clear()

    def _function(self):
        if self.how != "accumulating":
            return None

        @accumulating(steps=self.steps)
        def train_step(*args):
            x, count, poisoned = args[-1]
            loss = self._loss([a for a in args if isinstance(a, nn.Module)], x, poisoned)
            return loss if self.story["counts"] is None else LossSum(loss, self._count(count))

        return train_step

    def _clear(self) -> None:
        self.optimizer.zero_grad()
        for model in self.models:
            model.zero_grad()

    def _home(self, model: nn.Module) -> nn.Module:
        options = WRAPS[self.wrap]
        if options is None or not dist.is_initialized() or not any(p.requires_grad for p in model.parameters()):
            return model
        if model not in self._wrapped:
            self._wrapped[model] = DDP(model, process_group=self.group, **options)
        return self._wrapped[model]

    def _hook(self) -> dict:
        """Hooks on what the optimizer steps: one of them changes the gradient, all of them count."""
        owned = [p for group in self.optimizer.param_groups for p in group["params"]]
        inside = {id(p) for model in self.models for p in model.parameters()}
        hooked = {}
        for place, p in enumerate(owned):
            if not p.requires_grad:
                continue
            calls = [0, 0]

            def before(gradient, calls=calls, place=place):
                calls[0] += 1
                return gradient * 1.5 if place % 3 == 1 else None

            def after(parameter, calls=calls):
                assert parameter.grad is not None
                calls[1] += 1

            handles = [p.register_hook(before), p.register_post_accumulate_grad_hook(after)]
            hooked[id(p)] = handles, calls, id(p) in inside and id(p) not in {id(self.scale)}
        return hooked


def _whole(p: torch.Tensor) -> torch.Tensor:
    p = p.detach()
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def live(life: Life, ops: list[dict]) -> int:
    """How many of `ops` could be done. What torch cannot do on one process by hand either ends the reference there."""
    for number, op in enumerate(ops):
        done = len(life.trace)
        try:
            _do(life, op)
        except (RuntimeError, *IMPOSSIBLE):
            if life.how != "reference":
                raise
            del life.trace[done:]
            return number
    return len(ops)


def _do(life: Life, op: dict) -> None:
    if op["do"] == "loop":
        if life.how == "reference" and not _can_train(life):
            raise RuntimeError("there is nothing to train")
        life.loop(op)
        return
    try:
        EDITS[op["do"]](life)
    except IMPOSSIBLE:
        return
    if op["rewrap"] and life.wrap != "fsdp2":
        life.rewrap()


def _can_train(life: Life) -> bool:
    stepped = {id(p) for group in life.optimizer.param_groups for p in group["params"]}
    return all(any(p.requires_grad and id(p) in stepped for p in model.parameters()) for model in life.models[:1]) and any(
        p.requires_grad for model in life.models for p in model.parameters())  # fmt: skip


# -- on the ranks -----------------------------------------------------------------------------------------------------


def tell(story: dict, store: str) -> Outcome:
    """How a story ended on this rank."""
    if story["two"]:
        return in_two_threads(story, store)
    return one(story, store)


def one(story: dict, store: str, group=None) -> Outcome:
    with SEEDING:
        reference, life = Life("reference", story, store), Life(story["how"], story, store, group)
    ops = story["ops"][: live(reference, story["ops"])]
    tolerance = 1e-4 if any("float32" in op["do"] for op in ops) else 1e-9
    error = None
    try:
        live(life, ops)
    except GradSyncError as raised:
        error = str(raised)
    except NotExact as parted:
        return Outcome("off", str(parted))
    except Exception:  # noqa: BLE001
        return Outcome("foreign", traceback.format_exc(limit=-4))
    try:
        compare(life.trace, reference.trace, tolerance)
    except NotExact as parted:
        return Outcome("off", str(parted))
    if error is not None:
        return Outcome("error", error)
    return Outcome("exact") if len(life.trace) == len(reference.trace) else Outcome("off", "windows are missing")


def in_two_threads(story: dict, store: str) -> Outcome:
    """The story in two threads at a time, each with a model of its own, on a group of its own."""
    groups = [None, None]
    if dist.is_initialized() and world_size() > 1:
        if story["wrap"] == "bare":
            story = {**story, "wrap": "ddp"}  # which says on which group it is
        ranks = list(range(world_size()))
        groups = [dist.new_group(ranks, timeout=GROUP_TIMEOUT) for _ in range(2)]
    outcomes: list = [None, None]

    def run(place: int) -> None:
        outcomes[place] = one(story, store, groups[place])

    threads = [Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bad = [outcome for outcome in outcomes if outcome is None or outcome.kind != "exact"]
    return bad[0] if bad else Outcome("exact")
