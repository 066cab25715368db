"""FSDP2 with `MixedPrecisionPolicy`: a group reduces in one dtype, whatever of it was used, or was frozen as it first ran."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradsync

POLICIES = {
    "computes in bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "reduces in bfloat16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}


class Heads(nn.Module):
    """Sums of what is small enough to be exact in bfloat16: the gradient of `second` is that of `first` where it is used."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(4, 2)) for _ in range(2))

    def forward(self, x, is_both):
        return x @ (self.first + self.second if is_both else self.first)


def used(uses: list[str], policy: str, by: str) -> list:
    """The gradients of a window in whose micro-batches this rank uses the second parameter, or not ("1" or "0")."""
    rank, found = dist.get_rank(), []
    model = fully_shard(Heads(), mp_policy=POLICIES[policy])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps = len(uses[rank])
    x = torch.full((1, 4), 2.0 * (rank + 1))

    def note(*_):
        found.append([None if p.grad is None else p.grad.full_tensor().tolist() for p in model.parameters()])

    optimizer.register_step_pre_hook(note)
    step = gradsync.accumulating(steps)(lambda model, optimizer, is_both: model(x, is_both).float().sum())
    for _ in range(2):
        if by == "accumulating":
            for use in uses[rank]:
                step(model, optimizer, use == "1")
        elif by == "sync_every":
            for micro, use in gradsync.sync_every(model, steps, uses[rank]):
                micro.backward(model(x, use == "1").float().sum())
                if micro.last:
                    optimizer.step()
                    optimizer.zero_grad()
        else:
            with gradsync.no_sync(model):
                for use in uses[rank]:
                    (model(x, use == "1").float().sum() / steps).backward()
            gradsync.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("by", ["accumulating", "sync_every", "no_sync"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("uses", [["00"] * 2, ["01"] * 2, ["10"] * 2, ["0010"] * 2, ["00", "11"], ["01", "10"], ["0000", "0001"]])
def test_a_parameter_that_held_micro_batches_leave_out(ranks, uses, policy, by):
    """torch's assertion ("expects uniform gradient dtype") failed, or on one rank only, and the other waited."""
    mean = sum(2.0 * (rank + 1) * use.count("1") / len(use) for rank, use in enumerate(uses)) / 2
    for seen in ranks(2).run(used, uses, policy, by, limit=20):
        first, second = [[3.0] * 2] * 4, [[mean] * 2] * 4 if mean else None
        assert seen == [[first, second]] * 2


def frozen_as_it_first_ran(how: str, steps: int, sync: str) -> list:
    """What the maker's weight has moved by; its ranks have the gradients 256, 1, 1, 1 in turn."""
    policy, rank = MixedPrecisionPolicy(reduce_dtype=torch.float32), dist.get_rank()
    maker, judge = nn.Linear(1, 4, bias=False).bfloat16(), nn.Linear(4, 1, bias=False).bfloat16()
    nn.init.zeros_(maker.weight)
    nn.init.ones_(judge.weight)
    for model in (maker, judge):
        fully_shard(model, mp_policy=policy)
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for model, lr in ((maker, 1.0), (judge, 0.0))]
    x = torch.full((1, 1), 256.0 if rank == 0 else 1.0).bfloat16()

    def loss(one, other, optimizer):
        return judge(maker(x)).float().sum()

    make, judges = (gradsync.accumulating(steps, sync=sync)(loss) for _ in range(2))
    for index in range(steps):
        if how == "bystander":
            judges(judge, maker, optimizers[1])
        elif how == "frozen" and index == 0:
            maker.requires_grad_(False)
            judge(maker(x)).sum().backward()
            judge.zero_grad()
            maker.requires_grad_(True)
        if how != "by hand":
            make(maker, judge, optimizers[0])
    if how == "by hand":  # after a call in which it was a bystander
        judges(judge, maker, optimizers[1])
        judges.reset()
        loss(None, None, None).backward()
        optimizers[0].step()
    return maker.weight.full_tensor().flatten().tolist()


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("sync", ["window", "each"])
@pytest.mark.parametrize("how", ["trained", "bystander", "frozen", "by hand"])
def test_what_was_frozen_as_it_first_ran_is_reduced_in_the_policys_dtype(ranks, how, steps, sync):
    """The mean is 64.75, in bfloat16 65; added up in bfloat16 it is 64. Or the reduced gradient had a wrong dtype."""
    assert ranks(4).run(frozen_as_it_first_ran, how, steps, sync) == [[-65.0] * 4] * 4


def with_a_teacher_of_two_dtypes() -> float:
    """A teacher in bfloat16 with a norm in float32, which nobody trains."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    teacher[0].register_forward_hook(lambda _module, _args, output: output.float())
    teacher[0].register_forward_pre_hook(lambda _module, args: (args[0].bfloat16(),))
    fully_shard(teacher)
    student = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    step = gradsync.accumulating(2)(lambda student, teacher, optimizer, x: (student(x) - teacher(x)).square().mean())
    for _ in range(4):
        step(student, teacher, optimizer, torch.ones(2, 4))
    assert all(parameter.requires_grad for parameter in teacher.parameters())
    return step.progress.updates


def test_a_teacher_may_have_two_dtypes(ranks):
    """torch refuses that where it trains them."""
    assert ranks(2).run(with_a_teacher_of_two_dtypes) == [2, 2]


def beside_a_sharded_teacher(sync: str) -> list:
    """What a bare student's gradients come to, and how often they synchronise, in bfloat16."""
    torch.manual_seed(0)
    rank, teacher, student = dist.get_rank(), fully_shard(nn.Linear(3, 3)), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    step = gradsync.accumulating(4, sync=sync, compress="bf16")(
        lambda student, teacher, optimizer, x: student(teacher(x)).square().mean()
    )
    with gradsync.audit(student, optimizer) as report:
        for index in range(8):
            step(student, teacher, optimizer, torch.randn(5, 3, generator=torch.Generator().manual_seed(9 * rank + index)))
    return [report.syncs, report.wasted, [parameter.tolist() for parameter in student.parameters()]]


def test_each_waits_for_the_boundary_beside_a_sharded_teacher(ranks):
    """Only what is trained synchronises: the teacher's forward communicates, and the student's does not."""
    (each, *_), (window, *_) = (ranks(2).run(beside_a_sharded_teacher, sync) for sync in ("each", "window"))
    assert each == window and each[:2] == [2, 0]
