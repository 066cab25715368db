"""What runs on the ranks for test_travel.py and test_in_flight.py."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import GradSyncError
from gradsync.overlap import travel_of, depart, go_back, landing, provisional, step_ahead
from tests.overlap.loop import Behind, Model, memory_of, parameters_of
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch

DDPS = {"default": {}, "views": {"gradient_as_bucket_view": True}, "buckets": {"bucket_cap_mb": 1e-4}}


def data(index: int, dtype) -> torch.Tensor:
    return micro_batch(dist.get_rank(), index, dtype=dtype)


def gradients(model) -> list[torch.Tensor]:
    return [p.grad.detach().clone() for p in model.parameters()]


def neutral(config: str, dtype: str) -> None:
    """Held and synchronising backwards, some after a window that travelled."""
    dtype = getattr(torch, dtype)
    one, two = small_model(dtype), small_model(dtype)
    plain, hooked = DDP(one, **DDPS[config]), DDP(two, **DDPS[config])
    travel = travel_of(hooked)
    assert travel_of(hooked) is travel and len(hooked._comm_hooks) == 1
    for index in range(6):
        for ddp in (plain, hooked):
            with ddp.no_sync():
                mean_loss(ddp, data(index, dtype)).backward()
            loss = mean_loss(ddp, data(100 + index, dtype))
            if ddp is hooked and index in (2, 4):
                own = [p.grad.clone() + g for p, g in zip(two.parameters(), alone(two, 100 + index, dtype))]
                travel.begin()
                loss.backward()
                flight = travel.end()
                for p, mine in zip(two.parameters(), own):
                    torch.testing.assert_close(p.grad, mine)
                arrived = flight.arrive()
                for p, q in zip(one.parameters(), two.parameters()):
                    assert torch.equal(p.grad, arrived[q]), "what travels is what DDP computes, to the bit"
            else:
                loss.backward()
        if index not in (2, 4):
            assert all(torch.equal(a, b) for a, b in zip(gradients(one), gradients(two))), index
        for model in (one, two):
            model.zero_grad()


def alone(model, index, dtype):
    return torch.autograd.grad(mean_loss(model, data(index, dtype)), list(model.parameters()))


def compressed(dtype: str) -> None:
    """In bfloat16: cast, divided, added up; at once and travelling the same, the ledger in its own dtype."""
    dtype = getattr(torch, dtype)
    size = dist.get_world_size()
    model = Model(dtype)
    behind = Behind(model)
    behind.travel.dtype = torch.bfloat16
    model.loss(0, dist.get_rank()).backward()
    own = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    flight = behind.boundary(model.loss(0, dist.get_rank()))
    assert {one.copy.dtype for one in flight.sent} == {torch.bfloat16, behind.ledger.dtype}
    arrived = flight.arrive()
    for p, mine in zip(model.parameters(), own):
        share = torch.zeros_like(p) if mine is None else mine
        every = [torch.empty_like(share) for _ in range(size)]
        dist.all_gather(every, share.detach())
        if p is model.never:
            assert arrived[p] is None
            continue
        assert arrived[p].dtype == dtype
        # Each share is rounded to 8 bits, and so is each sum.
        bound = sum(one.abs() for one in every) / size * size * 2**-8
        assert ((arrived[p] - sum(every) / size).abs() <= bound + 1e-30).all()
        if size == 2:
            assert torch.equal(arrived[p], sum(one.bfloat16().div(size) for one in every).to(dtype))


def compressed_at_once() -> None:
    """Without overlap, as torch's own hook."""

    def bf16(group, bucket):  # torch refuses its own by name on a CPU
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import _compress_hook

        return _compress_hook(torch.bfloat16, group, bucket)

    one, two = small_model(torch.float32), small_model(torch.float32)
    theirs, mine = DDP(one), DDP(two)
    theirs.register_comm_hook(None, bf16)
    travel_of(mine).dtype = torch.bfloat16
    for index in range(3):
        for ddp in (theirs, mine):
            ddp.zero_grad()
            mean_loss(ddp, data(index, torch.float32)).backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(one), gradients(two)))
        assert all(torch.equal(g, g.bfloat16().float()) for g in gradients(two))


def sparse() -> None:
    embedding = nn.Embedding(6, 2, sparse=True).double()
    ddp = DDP(embedding)
    travel = travel_of(ddp)
    rank, size = dist.get_rank(), dist.get_world_size()
    mean = torch.zeros(6, 2, dtype=torch.float64)
    for one in range(size):
        mean[one] += 1 / size
        mean[5] += 1 / size
    for _ in range(2):
        loss = ddp(torch.tensor([rank, 5])).sum()
        travel.begin()
        loss.backward()
        flight = travel.end()
        assert embedding.weight.grad.to_dense()[:, 0].tolist() == [float(i in (rank, 5)) for i in range(6)]
        torch.testing.assert_close(flight.arrive()[embedding.weight].to_dense(), mean)
        embedding.zero_grad()
        ddp(torch.tensor([rank, 5])).sum().backward()
        torch.testing.assert_close(embedding.weight.grad.to_dense(), mean)
        embedding.zero_grad()


def pickles() -> None:
    """A DDP with the hook pickles and copies, in the middle of a flight too, and can overlap again."""
    ddp = DDP(small_model())
    travel = travel_of(ddp)
    for again in (lambda: pickle.loads(pickle.dumps(ddp)), lambda: copy.deepcopy(ddp)):
        loss = mean_loss(ddp, data(0, torch.float64))
        travel.begin()
        loss.backward()
        flight = travel.end()
        other = again()
        second = travel_of(other)
        assert second is not travel and travel_of(other) is second and len(other._comm_hooks) == 1
        other.zero_grad()
        loss = mean_loss(other, data(0, torch.float64))
        second.begin()
        loss.backward()
        for p, g in zip(other.parameters(), second.end().arrive().items()):
            torch.testing.assert_close(g[1], flight.arrive()[dict(zip(other.parameters(), ddp.parameters()))[g[0]]])
        ddp.zero_grad()
    rebuilt = pickle.loads(pickle.dumps(ddp))
    for hook, state in rebuilt._comm_hooks:  # as gradsync's engine does where it rebuilds a reducer
        dist._register_comm_hook(rebuilt.reducer, state, hook)
    assert travel_of(rebuilt).group is rebuilt.process_group and len(rebuilt._comm_hooks) == 1


def hooks_of_others() -> list[str]:
    texts = []
    for register in (
        lambda ddp: ddp.register_comm_hook(None, allreduce_hook),
        lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    ):
        ddp = DDP(small_model())
        register(ddp)
        with pytest.raises(GradSyncError) as caught:
            travel_of(ddp)
        texts.append(str(caught.value))
    return texts


def kept_gradients() -> None:
    """Whoever keeps a gradient that has landed, or a view of it, keeps its values; else the memory serves again."""
    model = Model()
    behind = Behind(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, places, last = [], [], None
    for window in range(6):
        flight = behind.boundary(model.loss(dist.get_rank(), window))
        flown = replace(depart([flight], [optimizer]), spare=memory_of(last))
        flown = step_ahead(flown, factor=1.0)
        with landing(flown):
            places.append({p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None})
            if window in (2, 3):
                view = model.inner[0].weight.grad.detach()[1:]
                kept.append((view, view.clone()))
            optimizer.step()
            optimizer.zero_grad()
        last = flown
    assert all(torch.equal(view, values) for view, values in kept)
    assert places[2] == places[1], "buckets were put in order after the first"
    assert places[3].isdisjoint(places[2]) and places[4].isdisjoint(places[3]) and places[5] == places[4]


def sent_while_a_window_is_open() -> None:
    """What the open window holds is taken out and given back, whether the landing goes well or not."""
    model = Model()
    behind = Behind(model)
    optimizer = torch.optim.AdamW(model.parameters())
    flight = behind.boundary(model.loss(dist.get_rank(), 0))
    flown = step_ahead(depart([flight], [optimizer]), factor=1.0)
    model.loss(dist.get_rank(), 2).backward()
    held = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in held]
    with pytest.raises(ZeroDivisionError), landing(flown):
        assert all(p.grad is not g for p, g in zip(model.parameters(), held) if g is not None)
        raise ZeroDivisionError
    for p, g, value in zip(model.parameters(), held, values):
        assert p.grad is g and (g is None or torch.equal(g, value))


def going_back() -> None:
    """After an exception parameters are the last true ones, and what travels lands later, and may again fail first."""
    model = Model()
    behind = Behind(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = parameters_of(model)
    flight = behind.boundary(model.loss(dist.get_rank(), 0))
    flown = step_ahead(depart([flight], [optimizer], [model]), factor=1.0)
    assert any(not torch.equal(p, was) for p, was in zip(model.parameters(), before))
    back = go_back(flown)
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before)) and not optimizer.state
    assert go_back(back) is back
    go_back(flown)
    with torch.no_grad():
        model.extra.add_(1)
    with pytest.raises(GradSyncError, match="extra was written to"), landing(back):
        raise AssertionError
    go_back(flown)  # a value that was kept is as good
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before))
    with landing(back):
        mean = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    for p, was, g in zip(model.parameters(), before, mean):
        assert torch.equal(p, was) if g is None else torch.allclose(p, was - 0.1 * g)


def writes() -> list[str]:
    """By the user, to parameters or to the optimizer, while gradients travel."""
    texts = []
    for how in ("load", "no_grad", "copy_", "optimizer", "data", "momentum", "state", "dtype"):
        model = Model()
        behind = Behind(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before, state = parameters_of(model), copy.deepcopy(optimizer.state_dict())
        flight = behind.boundary(model.loss(dist.get_rank(), 0))
        flown = step_ahead(depart([flight], [optimizer], [model]), factor=1.0)
        if how == "load":
            model.load_state_dict(Model().state_dict())
        elif how == "optimizer":
            optimizer.load_state_dict(state)
        elif how == "data":
            model.extra.data = model.extra.data * 2
        elif how == "momentum":
            optimizer.state[model.inner[0].weight]["momentum_buffer"].zero_()
        elif how == "state":
            optimizer.state.clear()
        elif how == "dtype":
            model.float()
        else:
            with torch.no_grad():
                model.extra.mul_(2) if how == "no_grad" else model.extra.copy_(torch.zeros(3))
        with pytest.raises(GradSyncError) as caught, landing(flown):
            raise AssertionError
        texts.append(str(caught.value))
        if how != "dtype":
            assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before)), "the last true ones"
    with pytest.raises(GradSyncError), landing(go_back(flown)):
        raise AssertionError  # they cannot land on another dtype
    return texts


def saving() -> None:
    """`state_dict` of the model, of a part, of the optimizer: lands first; the hooks are there only then.

    The one that ran goes when the next window departs.
    """
    model = Model()
    behind = Behind(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    flown = last = None

    def hooks():
        modules = [len(m._state_dict_pre_hooks) for m in model.modules()]
        return sum(modules) + len(optimizer._optimizer_state_dict_pre_hooks)

    def land():
        nonlocal flown, last
        if flown is not None:
            with landing(flown):
                optimizer.step()
                optimizer.zero_grad()
            flown, last = None, flown

    for what in (model, model.inner, model.inner[0], optimizer, model):
        true = parameters_of(model)
        flight = behind.boundary(model.loss(dist.get_rank(), 0))
        flown = step_ahead(depart([flight], [optimizer], [model], land), factor=1.0)
        assert hooks() == len(list(model.modules())) + 1
        twin = pickle.loads(pickle.dumps(model))
        copy.deepcopy(model).state_dict()
        twin.state_dict()
        pickle.dumps(optimizer)
        assert flown is not None, "of a copy: nothing lands"
        provisional = parameters_of(model)
        mine = what.register_state_dict_pre_hook(lambda *_: None)  # comes after ours, which must not go meanwhile
        what.state_dict()
        assert flown is None
        assert not all(map(torch.equal, true, parameters_of(model)))
        assert not all(map(torch.equal, provisional, parameters_of(model)))
        after = parameters_of(model)
        what.state_dict()
        assert all(map(torch.equal, after, parameters_of(model)))
        mine.remove()
        assert hooks() == 1, "the one that ran, deaf"
    last.watch.end()
    assert hooks() == 0


def lost_rank() -> str:
    """Rank 1 never synchronises: rank 0's landing fails, and its parameters are the last true ones."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = small_model()
    ddp = DDP(model, process_group=group)
    travel = travel_of(ddp)
    text = ""
    if dist.get_rank() == 0:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = parameters_of(model)
        loss = mean_loss(ddp, data(0, torch.float64))
        travel.begin()
        with ddp.no_sync():
            loss.backward()
        flown = step_ahead(depart([travel.end()], [optimizer], [model]), factor=1.0)
        assert not all(map(torch.equal, parameters_of(model), before))
        with pytest.raises(GradSyncError) as caught, landing(flown):
            raise AssertionError
        text = str(caught.value)
        assert all(map(torch.equal, parameters_of(model), before)) and not optimizer.state
    dist.barrier()
    return text


class Talking(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
        super().step()


def a_step_that_communicates() -> list[str]:
    """Found by the group's count of collectives, and where its backend has none, as an operation."""
    texts = []
    counting = provisional._numbers_sent
    for number in (counting, lambda groups: None):
        provisional._numbers_sent = number
        try:
            model = Model()
            behind = Behind(model)
            optimizer = Talking([model.inner[0].weight], lr=0.1)
            before = parameters_of(model)
            flight = behind.boundary(model.loss(dist.get_rank(), 0))
            with pytest.raises(GradSyncError) as caught:
                step_ahead(depart([flight], [optimizer]), factor=1.0)
            assert all(map(torch.equal, parameters_of(model), before))
            assert all(p.grad is None for p in model.parameters()), "of those in no optimizer too"
            texts.append(str(caught.value))
        finally:
            provisional._numbers_sent = counting
    return texts
