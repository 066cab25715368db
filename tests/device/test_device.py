"""The fake device itself: its numbers are true, it counts waits where a real device would wait, and it finds races."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.device import run_on_device, waits
from tests.parts import cases_device

RATE = 0.1


def in_turn(*cases) -> list:
    """Several cases on the same processes, whose start is most of what a case costs."""
    return [case() for case in cases]


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 1, generator=generator)


def in_float64(ranks: int, steps: int) -> list[torch.Tensor]:
    """The parameters after `steps` updates by the mean over all ranks, on the CPU, in one process."""
    model = small_model().double()
    for step in range(steps):
        losses = [
            torch.nn.functional.mse_loss(model(inputs.double()), targets.double())
            for inputs, targets in (batch(rank, step) for rank in range(ranks))
        ]
        gradients = torch.autograd.grad(sum(losses) / ranks, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter -= RATE * gradient
    return [parameter.detach() for parameter in model.parameters()]


# -- numbers --------------------------------------------------------------------------------------------------------


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])


def fsdp1(model):
    return FullyShardedDataParallel(model, device_id=0, use_orig_params=True)


def fsdp2(model):
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def train_plainly(wrap, scaled: bool = False) -> tuple[list[torch.Tensor], list[str]]:
    """Three updates with torch alone; the parameters, and the races that were found."""
    from tests.device.fake import races

    model = wrap(small_model().to("cuda"))
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0) if scaled else None
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    races()
    for step in range(3):
        inputs, targets = (tensor.to("cuda") for tensor in batch(dist.get_rank(), step))
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    found = races()
    if wrap is fsdp1:
        with FullyShardedDataParallel.summon_full_params(model):
            return [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()], found
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().cpu() for p in model.parameters()], found


ENGINES = {"DDP": (ddp,), "GradScaler": (ddp, True), "FSDP1": (fsdp1,), "FSDP2": (fsdp2,)}


def train_on_all() -> dict[str, tuple]:
    warnings.simplefilter("ignore")
    return {engine: train_plainly(*how) for engine, how in ENGINES.items()}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, tuple]]:
    return [one for one, _, _ in on_two()]


@pytest.mark.parametrize("engine", ENGINES)
def test_torch_alone_trains_on_it_with_true_numbers_and_no_races(engine, trained):
    expected = in_float64(2, 3)
    for parameters, races in (one[engine] for one in trained):
        assert races == []
        for parameter, reference in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.double(), reference, rtol=0, atol=1e-6)


# -- waits ----------------------------------------------------------------------------------------------------------


def count_waits() -> dict[str, int]:
    import gradsync  # noqa: F401

    host, on_device = torch.ones(3), torch.ones(3, device="cuda")
    pinned = torch.empty(3).pin_memory()
    assert pinned.is_pinned() and pinned[1:].is_pinned() and not host.is_pinned()
    stream, event = torch.Stream("cuda"), torch.Event("cuda")
    actions = {
        "item": lambda: on_device.sum().item(),
        "bool": lambda: bool(on_device.sum() > 0),
        "float": lambda: float(on_device.sum()),
        "tolist": lambda: on_device.tolist(),
        "equal": lambda: torch.equal(on_device, on_device),
        "nonzero": lambda: on_device.nonzero(),
        "to the host": lambda: on_device.cpu(),
        "from the host": lambda: host.to("cuda"),
        "torch.tensor(list)": lambda: torch.tensor([1.0, 2.0], device="cuda"),
        "pageable, non_blocking": lambda: host.to("cuda", non_blocking=True),
        "stream": stream.synchronize,
        "device": torch.accelerator.synchronize,
        # and none:
        "pinned, non_blocking": lambda: pinned.to("cuda", non_blocking=True),
        "into pinned, non_blocking": lambda: pinned.copy_(on_device, non_blocking=True),
        "arithmetic": lambda: on_device.mul(2).add_(1).sum(),
        "made there": lambda: torch.full((3,), 2.0, device="cuda"),
        "wait_stream": lambda: torch.accelerator.current_stream().wait_stream(stream),
        "event": lambda: event.record(),
    }
    counts = {}
    for name, action in actions.items():
        with waits() as found:
            action()
        counts[name] = found.total()
    return counts


def test_waits_are_counted_where_a_real_device_would_wait():
    [[counts, *_]] = on_one()
    free = ("pinned, non_blocking", "into pinned, non_blocking", "arithmetic", "made there", "wait_stream", "event")
    assert counts == {name: 0 if name in free else 1 for name in counts}


@functools.cache
def on_one() -> list[list]:
    parts = (cases_device.a_thread_that_is_at_a_gradient, cases_device.waits_of_a_call_that_fits)
    return run_on_device(in_turn, count_waits, place_of_a_wait, *parts, ranks=1)


def place_of_a_wait() -> list[tuple[str, str]]:
    import gradsync

    model = torch.nn.Linear(2, 1).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    @gradsync.accumulating(steps=1)
    def step(model, optimizer, inputs):
        return model(inputs).square().mean() * inputs.sum().item()

    with waits() as found:
        step(model, optimizer, torch.ones(2, 2, device="cuda"))
    return [*found]


def test_a_wait_has_its_place():
    [[_, found, *_]] = on_one()
    places = [place for operation, place in found if operation == "item"]
    assert places and all(place.startswith(("gradsync: ", "outside: ")) for place in places), found


# -- parts ------------------------------------------------------------------------------------------------------------


def test_a_device_whose_thread_is_at_a_gradient_while_the_host_runs_out_of_memory():
    """What the thread brings has arrived: it is not brought again by the parts, and its hooks run once."""
    [[_, _, (made, expected, hooks, parts), _]] = on_one()
    for some, others in zip(made, expected, strict=True):
        torch.testing.assert_close(some, others)
    assert (hooks, parts) == (1, 4)


def test_fit_makes_the_host_wait_for_nothing():
    """Where everything fits."""
    [[*_, found]] = on_one()
    assert found == {}


# -- streams and collectives ------------------------------------------------------------------------------------------


def race() -> tuple[list[str], list[str], list[str]]:
    from tests.device.fake import races

    side = torch.Stream("cuda")
    tensor = torch.zeros(4, device="cuda")
    races()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tensor.add_(1)
    tensor.mul(2)  # the side stream may still be at it
    unordered = races()
    torch.accelerator.current_stream().wait_stream(side)
    tensor.mul(2)
    ordered = races()
    dist.all_reduce(tensor, async_op=True)  # and nobody waits for it
    tensor.add_(1)
    return unordered, ordered, races()


def test_two_streams_that_use_the_same_memory_in_no_order_are_a_race():
    for _, (unordered, ordered, collective), _ in on_two():
        assert "aten::mul on stream 0 reads what aten::add on stream" in unordered[0], unordered
        assert ordered == []
        assert "aten::add on stream 0 reads what likenccl:all_reduce on stream 1 wrote" in collective


@functools.cache
def on_two() -> list[list]:
    return run_on_device(in_turn, train_on_all, race, refuse_the_host)


def refuse_the_host() -> str:
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_its_backend_takes_tensors_of_the_device_only():
    assert all("No backend type associated with device type cpu" in text for _, _, text in on_two())


def test_a_case_that_fails_says_on_which_rank():
    with pytest.raises(AssertionError, match=r"fail_on_the_second\(\) failed on\nrank 1:[\s\S]*ValueError: on purpose"):
        run_on_device(fail_on_the_second, limit=60)


def fail_on_the_second() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
