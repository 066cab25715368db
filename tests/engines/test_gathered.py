"""Tensors that a forward of FSDP has gathered stand in the model for its parameters: no optimizer may be made of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

import gradsync
from tests.support.compare import assert_equal_state
from tests.support.loops import over, sync_every
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean

STEPS, LR = 2, 0.1


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loop_over(loop: Callable, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    data = [micro_batch(dist.get_rank(), index) for index in range(4)]
    loop(STEPS, model, optimizer, lambda x: mean_loss(model, x), data)


def fsdp2(model: nn.Sequential) -> nn.Module:
    return fully_shard(model)


def fsdp2_without_root(model: nn.Sequential) -> nn.Module:
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return model


def fsdp2_resharded_to_two(model: nn.Sequential) -> nn.Module:
    for layer in (model[0], model[2]):
        fully_shard(layer, reshard_after_forward=2)
    return fully_shard(model)


def made_after_an_evaluation(wrap: Callable, loop: Callable) -> str:
    model = wrap(net())
    with torch.no_grad():
        model(micro_batch(0, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    try:
        loop_over(loop, model, optimizer)
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("loop", [over, sync_every])
@pytest.mark.parametrize("wrap", [fsdp2, fsdp2_without_root])
def test_an_optimizer_of_gathered_tensors_is_an_error_on_every_rank(ranks, wrap, loop):
    """It killed the process, or trained nothing."""
    for said in ranks(2).run(made_after_an_evaluation, wrap, loop):
        assert "tensors that FSDP had gathered" in said and "Make the optimizer before any forward" in said


def unfrozen_later(loop: Callable) -> dict:
    """The first layer, a root of its own, is frozen in the first loop, and trained by a new optimizer in the second."""
    model = fsdp2_without_root(net())
    model[0].requires_grad_(False)
    loop_over(loop, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR))
    model[0].requires_grad_(True)
    loop_over(loop, model, torch.optim.SGD(model.parameters(), lr=LR))
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("loop", [over, sync_every])
def test_a_frozen_root_that_is_unfrozen_after_a_loop(ranks, loop):
    """No backward reshards it: between windows its parameters are back in the model all the same."""
    model = net()
    for frozen in (True, False):
        model[0].requires_grad_(not frozen)
        _, model = train(model, cut([4, 4], STEPS), window_mean, lr=LR)
    for came in ranks(2).run(unfrozen_later, loop):
        assert_equal_state(came, model.state_dict(), 1e-12)


def frozen_after_an_evaluation(wrap: Callable, loop: Callable, at_the_module: bool) -> dict:
    """A loop, an evaluation, and then the first layer is frozen; after the next evaluation it is trained again."""
    model = wrap(net())
    own = [*model[0].parameters()]  # as the optimizer has them
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for frozen in (False, True, False):
        for parameter in model[0].parameters() if at_the_module else own:
            parameter.requires_grad_(not frozen)
        loop_over(loop, model, optimizer)
        with torch.no_grad():
            model(micro_batch(0, 0))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("loop", [over, sync_every])
@pytest.mark.parametrize("wrap", [fsdp2, fsdp2_without_root, fsdp2_resharded_to_two])
@pytest.mark.parametrize("at_the_module", [True, False])
def test_a_layer_that_is_frozen_after_an_evaluation(ranks, wrap, loop, at_the_module):
    """What the user freezes are gathered tensors, and FSDP forgets that as it puts its parameters back; or they are its
    own, which the gathered ones do not know of.
    """
    model = net()
    for frozen in (False, True, False):
        model[0].requires_grad_(not frozen)
        _, model = train(model, cut([4, 4], STEPS), window_mean, lr=LR)
    for came in ranks(2).run(frozen_after_an_evaluation, wrap, loop, at_the_module):
        assert_equal_state(came, model.state_dict(), 1e-12)


def frozen_in_the_middle(wrap: Callable, loop: str, at_the_module: bool, evaluates: bool) -> str:
    """In the middle of a window, after an evaluation or right after a micro-batch, the first layer is frozen."""
    model = wrap(net())
    own = [*model[0].parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    step = gradsync.accumulating(steps=3, model=model, optimizer=optimizer)(lambda x: mean_loss(model, x))
    try:
        for micro, index in zip(gradsync.sync_every(model, 3) if loop == "sync_every" else [None] * 3, range(3)):
            if index == 1:
                if evaluates:
                    with torch.no_grad():
                        model(micro_batch(0, 0))
                for parameter in model[0].parameters() if at_the_module else own:
                    parameter.requires_grad_(False)
            x = micro_batch(dist.get_rank(), index)
            step(x) if micro is None else micro.backward(mean_loss(model, x))
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("loop", ["calls", "sync_every"])
@pytest.mark.parametrize("wrap", [fsdp2, fsdp2_without_root, fsdp2_resharded_to_two])
@pytest.mark.parametrize("at_the_module", [True, False])
@pytest.mark.parametrize("evaluates", [True, False])
def test_a_layer_that_is_frozen_in_the_middle_of_a_window(ranks, wrap, loop, at_the_module, evaluates):
    """FSDP forgot it with the gathered tensors, and the layer was trained by some micro-batches."""
    for said in ranks(2).run(frozen_in_the_middle, wrap, loop, at_the_module, evaluates):
        assert "requires_grad of 2 parameters is another" in said


def judged(make: Callable, *, several: bool) -> list[torch.Tensor]:
    """A GAN: in the judge's step the maker is a bystander, whose output needs no gradient."""
    maker, judge = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
    for number, parameter in enumerate([*maker.parameters(), *judge.parameters()]):
        nn.init.uniform_(parameter, -1, 1, generator=torch.Generator().manual_seed(number))
    maker = make(maker)
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in (judge, maker)]

    def judge_loss(x):
        return (judge(x) - judge(maker(x))).square().mean()

    def maker_loss(x):
        return judge(maker(x)).square().mean()

    if several:
        steps = [
            gradsync.accumulating(steps=STEPS, model=(judge, maker), optimizer=optimizer)(loss)
            for loss, optimizer in zip((judge_loss, maker_loss), optimizers, strict=True)
        ]
        for index in range(4):
            for step in steps:
                step(micro_batch(dist.get_rank(), index))
        with FullyShardedDataParallel.summon_full_params(maker):
            return [parameter.detach().clone() for parameter in (*judge.parameters(), *maker.parameters())]
    losses = zip((judge_loss, maker_loss), optimizers, strict=True)
    held = [(loss, optimizer, [p for group in optimizer.param_groups for p in group["params"]]) for loss, optimizer in losses]
    sums = [[torch.zeros_like(parameter) for parameter in parameters] for *_, parameters in held]
    for index in range(4):
        for (loss, optimizer, parameters), total in zip(held, sums, strict=True):
            gradients = torch.autograd.grad(sum(loss(micro_batch(rank, index)) for rank in range(2)) / (2 * STEPS), parameters)
            torch._foreach_add_(total, gradients)
            if index % STEPS == STEPS - 1:
                for parameter, gradient in zip(parameters, total, strict=True):
                    parameter.grad = gradient.clone()
                    gradient.zero_()
                optimizer.step()
    return [parameter.detach() for parameter in (*judge.parameters(), *maker.parameters())]


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp1_flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def on_ranks(make: Callable) -> list[torch.Tensor]:
    return judged(make, several=True)


@pytest.mark.parametrize("make", [fsdp1, fsdp1_flat])
def test_a_bystander_on_fsdp1(ranks, make):
    """torch's own assertion failed in the maker's step."""
    for came in ranks(2).run(on_ranks, make):
        torch.testing.assert_close(came, judged(lambda model: model, several=False), rtol=1e-12, atol=1e-12)


def no_sync_after_an_evaluation(wrap: Callable) -> None:
    """An evaluation has left gathered tensors; then gradients are held by hand, and synchronised."""
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    rank = dist.get_rank()
    with torch.no_grad():
        model(micro_batch(0, 0))
    with gradsync.no_sync(model):
        for index in range(2):
            (mean_loss(model, micro_batch(rank, index)) / 2).backward()
    gradsync.sync_gradients(model)
    optimizer.step()
    _, expected = train(net(), [[(r, index) for r in range(2) for index in range(2)]], window_mean, LR)
    with torch.no_grad():
        torch.testing.assert_close(model(micro_batch(0, 9)), expected(micro_batch(0, 9)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wrap", [fsdp2, fsdp2_without_root, fsdp1, fsdp1_flat])
def test_no_sync_after_an_evaluation(ranks, wrap):
    ranks(2).run(no_sync_after_an_evaluation, wrap)
