"""`ddp`: when it wraps, what it refuses, and gradients that travel in bfloat16."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.launch.compress_of_ddp import compressed_mean
from gradsync.ranks.group import require_group

# -- without a group --------------------------------------------------------------------------------------------------


def test_several_ranks_without_a_process_group_are_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(gradsync.GradSyncError, match=r"^gradsync\.ddp needs the process group.*WORLD_SIZE.*process_group\(\)"):
        gradsync.ddp(torch.nn.Linear(1, 1))
    with pytest.raises(gradsync.GradSyncError, match="^audit needs the process group"):
        require_group("audit")


@pytest.mark.parametrize("size", ["1", "", "auto"])
def test_one_rank_needs_no_group(monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    model = torch.nn.Linear(1, 1)
    assert gradsync.ddp(model) is model
    assert gradsync.ddp(model, compress="bf16") is model


@pytest.mark.parametrize("compress", ["fp16", "BF16", True, torch.bfloat16])
def test_what_compress_cannot_be(compress):
    with pytest.raises(ValueError, match=r'compress needs "bf16", or None .* but it is'):
        gradsync.ddp(torch.nn.Linear(1, 1), compress=compress)


# -- on ranks ---------------------------------------------------------------------------------------------------------


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def inputs_of(rank: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))


def gradients_of(model: torch.nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    loss = model(inputs).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def compressed_gradients(buckets_of_mb: float) -> tuple[list[torch.Tensor], bool]:
    """The gradients of two synchronised backwards, the second of which has rebuilt buckets; and whether ranks agree."""
    model = gradsync.ddp(make_model(), compress="bf16", bucket_cap_mb=buckets_of_mb)
    for _ in range(2):
        model.zero_grad()
        model(inputs_of(dist.get_rank())).square().mean().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return found, all(torch.equal(a, b) for other in everywhere for a, b in zip(found, other, strict=True))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("buckets_of_mb", [25, 0.0001])
def test_compressed_gradients_are_the_mean_to_bfloat16(ranks, num_ranks, buckets_of_mb):
    """Each share is rounded twice, cast and divided, and each of the sums once: by at most 2**-8 of what is rounded."""
    shares = [gradients_of(make_model().double(), inputs_of(rank).double()) for rank in range(num_ranks)]
    exact = [sum(parts) / num_ranks for parts in zip(*shares)]
    bounds = [sum(part.abs() for part in parts) / num_ranks * 2**-8 * (num_ranks + 1) + 1e-7 for parts in zip(*shares)]
    for found, agree in ranks(num_ranks).run(compressed_gradients, buckets_of_mb):
        assert agree
        errors = [(one.double() - mean).abs() for one, mean in zip(found, exact, strict=True)]
        assert all((error <= bound).all() for error, bound in zip(errors, bounds, strict=True))
        assert any((error > 1e-6).any() for error in errors), "these have not been rounded at all"


def bytes_sent() -> list[str]:
    """The dtypes of what a synchronised backward sends."""
    model = gradsync.ddp(make_model(), compress="bf16")
    sent, plain = [], dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        sent.append(str(tensor.dtype))
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        model(inputs_of(0)).sum().backward()
    finally:
        dist.all_reduce = plain
    return sent


def test_what_travels_is_bfloat16(ranks):
    assert ranks(2).run(bytes_sent) == [["torch.bfloat16"]] * 2


def over_a_part() -> tuple[float, float]:
    """The gradient over two ranks of three, and over this rank's own inputs."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return 0.0, 0.0
    model = gradsync.ddp(torch.nn.Linear(1, 1, bias=False), compress="bf16", process_group=group)
    model(torch.tensor([[float(dist.get_rank() + 1)]])).sum().backward()
    return model.module.weight.grad.item(), 2.0


def test_a_group_of_some_ranks_averages_over_these(ranks):
    assert all(found == expected for found, expected in ranks(3).run(over_a_part))


def twice_and_copied() -> dict[str, object]:
    warnings.simplefilter("ignore")
    model = gradsync.ddp(make_model(), compress="bf16")
    same = gradsync.ddp(model, compress="bf16") is model and gradsync.ddp(model) is model
    late = DistributedDataParallel(make_model())
    gradsync.ddp(late, compress="bf16")
    hooked = DistributedDataParallel(make_model())
    hooked.register_comm_hook(None, somebody_elses)
    try:
        gradsync.ddp(hooked, compress="bf16")
        refusal = ""
    except gradsync.GradSyncError as error:
        refusal = str(error)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), torch.load(buffer, weights_only=False)]
    gradients = []
    for one in (model, late, *copies, *(gradsync.ddp(one, compress="bf16") for one in copies)):
        one.zero_grad()
        one(inputs_of(dist.get_rank())).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in one.parameters()])
    return {"same": same, "refusal": refusal, "hooks": [hook for hook, _ in model._comm_hooks], "gradients": gradients}


def somebody_elses(state, bucket):
    return compressed_mean(state, bucket)


def test_it_is_idempotent_and_copies_as_a_plain_ddp_does(ranks):
    """A copy of torch's has no hook in its reducer: exact gradients, until `ddp` is asked again."""
    for result in ranks(2).run(twice_and_copied):
        assert result["same"] and result["hooks"] == [compressed_mean]
        assert "has one already: somebody_elses. Leave one of the two out." in result["refusal"]
        compressed, late, copied, loaded, *again = result["gradients"]
        for other in (late, *again):
            assert all(torch.equal(a, b) for a, b in zip(compressed, other, strict=True))
        for other in (copied, loaded):
            for a, b in zip(compressed, other, strict=True):
                torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-3)
