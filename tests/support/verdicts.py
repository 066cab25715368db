"""The rule of every test on ranks: exact against float64 on every rank, or an error on every rank; never a third thing.

A case ends in a `Verdict`, which `verdict(run)` makes of what `run` does: it compares and returns, or the library raises.
On the side of the test, `exact`, `refused` and `exact_or_refused` ask what all ranks said.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import GradSyncError
from tests.support.compare import assert_equal_updates
from tests.support.recorder import Recorder
from tests.support.reference import micro_batch

LIMIT = 45.0  # seconds a case may take, the start of its ranks on a busy machine included
ERRORS = (GradSyncError, TypeError, ValueError)

ENGINES = ("bare", "ddp", "find_unused", "fsdp2")
NOT_SHARDED = ENGINES[:3]


@dataclass(frozen=True)
class Verdict:
    """How a case ended on one rank: "exact", "refused" with the error's words, "wrong", or a "third" thing."""

    kind: str
    text: str = ""


def verdict(run: Callable[[], object]) -> Verdict:
    """Run it and say how it ended; an error counts as a refusal only where the library itself raises it."""
    try:
        run()
    except GradSyncError as error:
        return Verdict("refused", str(error))
    except (TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        ours = "/gradsync/" in last and "/tests/" not in last
        return Verdict("refused" if ours else "third", str(error) if ours else traceback.format_exc())
    except AssertionError as error:
        return Verdict("wrong", str(error))
    except BaseException:
        return Verdict("third", traceback.format_exc())
    return Verdict("exact")


def verdicts(ranks, case: Callable, *args: object) -> list[Verdict]:
    """What each rank said; a hang or a death is a third thing. Ranks that disagree are not used again."""
    said = [value if ok else Verdict("third", str(value)) for ok, value in ranks.outcomes(case, *args, limit=LIMIT)]
    if len({one.kind for one in said}) > 1 or said[0].kind == "third":
        ranks.stop()
    return said


def _told(said: Sequence[Verdict]) -> str:
    return "\n".join(f"rank {rank} said {one.kind}: {one.text}" for rank, one in enumerate(said))


def exact(said: Sequence[Verdict]) -> None:
    """Every rank is exact."""
    assert all(one.kind == "exact" for one in said), _told(said)


def refused(said: Sequence[Verdict], *words: str) -> None:
    """Every rank raised, with these words; a word may be alternatives: "flush|reset"."""
    assert all(one.kind == "refused" for one in said), _told(said)
    for one in said:
        says(one.text, *words)


def exact_or_refused(said: Sequence[Verdict]) -> None:
    """All exact, or all refused: the contract leaves which, and all ranks must agree on it."""
    assert said[0].kind in {"exact", "refused"} and len({one.kind for one in said}) == 1, _told(said)


def says(text: str, *words: str) -> None:
    """The text has each word, or for "a|b" either of them; case does not matter."""
    for word in words:
        assert any(one.lower() in text.lower() for one in word.split("|")), f"{word!r} is not in: {text}"


# -- models and data ------------------------------------------------------------------------------------------------


class FullRecorder(Recorder):
    """SGD that keeps the whole gradients of each update, wherever their parts are."""

    def step(self, closure=None):
        whole = [
            None if p.grad is None else getattr(p.grad, "full_tensor", lambda g=p.grad: g)().detach().to_dense().clone()
            for group in self.param_groups
            for p in group["params"]
        ]
        result = super().step(closure)
        self.seen[-1] = whole
        return result


def on_engine(model: nn.Module, engine: str) -> nn.Module:
    """The model on an engine, as its user would put it there."""
    if engine == "bare":
        return model
    if engine == "fsdp2":
        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child)
        return fully_shard(model)
    options = {"find_unused": {"find_unused_parameters": True}, "views": {"gradient_as_bucket_view": True}}
    return DDP(model, **options.get(engine, {}))


def items_of_rank(lengths: Sequence[int]) -> list[torch.Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return [micro_batch(rank, i) for i in range(lengths[rank])]


def compare(seen: list, expected: list, tolerance: float = 1e-10) -> None:
    assert_equal_updates(seen, expected, tolerance)


def in_turn(*bodies: Iterable) -> None:
    """Run generators in threads of their own, one piece of each at a time, in the same order on every rank."""
    errors: list[BaseException] = []
    turns = [threading.Semaphore(0) for _ in bodies]
    live = list(range(len(bodies)))
    lock = threading.Lock()

    def passed_on(me: int, *, done: bool) -> None:
        with lock:
            place = live.index(me)
            if done:
                live.remove(me)
            if live:
                turns[live[(place if done else place + 1) % len(live)]].release()

    def work(me: int, body: Iterator) -> None:
        turns[me].acquire()
        try:
            for _ in body:
                passed_on(me, done=False)
                turns[me].acquire()
        except BaseException as error:
            errors.append(error)
        finally:
            passed_on(me, done=True)

    threads = [threading.Thread(target=work, args=(me, iter(body)), daemon=True) for me, body in enumerate(bodies)]
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


