"""The provisional step: what it changes is put back to the bit, and nobody notices it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradsync.functional import bare_optimizer
from gradsync.overlap.provisional import provisional_step
from gradsync.overlap.saved import Saved
from tests.overlap.optimizers import SOME, Counting
from tests.support.models import small_model


def give(parameters, seed: int, leave_out: int | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for place, p in enumerate(parameters):
        p.grad = None if place == leave_out else torch.randn(p.shape, generator=generator, dtype=p.dtype)


def assert_alike(a, b, where: str = "") -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_alike(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for place, (x, y) in enumerate(zip(a, b)):
            assert_alike(x, y, f"{where}[{place}]")
    else:
        assert a == b, where


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_windows_with_provisional_steps_in_between_are_those_without(name, dtype):
    """Parameters, state and groups, for optimizers of all kinds; the first window's state did not exist before."""
    one, two = small_model(dtype), small_model(dtype)
    mine, reference = SOME[name](list(one.parameters())), SOME[name](list(two.parameters()))
    saved = None
    for window in range(5):
        give(one.parameters(), 1000 + window, leave_out=window % 3)
        before = copy.deepcopy(mine.state_dict())
        objects = {id(value) for state in mine.state.values() for value in state.values() if torch.is_tensor(value)}
        parameters = [p.detach().clone() for p in one.parameters()]
        torch.manual_seed(window)
        saved = provisional_step([mine], factor=0.5, clip_norm=0.7, spare=saved)
        assert saved is not None and all(p.grad is None for p in one.parameters())
        assert any(not torch.equal(p, was) for p, was in zip(one.parameters(), parameters)), "it is a step"
        saved.put_back()
        assert_alike(mine.state_dict(), before)
        assert objects == {id(v) for state in mine.state.values() for v in state.values() if torch.is_tensor(v)}
        assert len(mine.state) == len(before["state"])
        saved.put_back()  # once more is harmless
        for model, optimizer in ((one, mine), (two, reference)):
            torch.manual_seed(window)
            give(model.parameters(), window)
            optimizer.step()
        assert_alike(mine.state_dict(), reference.state_dict())
        for p, q in zip(one.parameters(), two.parameters()):
            assert torch.equal(p, q)


def test_a_sparse_gradient_steps_and_is_put_back():
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 3])).sum().backward()
    saved = provisional_step([optimizer], factor=0.5, clip_norm=1.0, nonfinite="skip")
    assert saved is not None and not torch.equal(embedding.weight, before)
    saved.put_back()
    assert torch.equal(embedding.weight, before) and not optimizer.state


def test_several_optimizers_are_clipped_by_one_norm_and_all_put_back():
    model = small_model()
    first, last = list(model[0].parameters()), list(model[2].parameters())
    sgd, adam = torch.optim.SGD(first, lr=1.0), torch.optim.AdamW(last, lr=0.1)
    give(model.parameters(), 1)
    gradients = [p.grad * 0.25 for p in model.parameters()]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    before = [p.detach().clone() for p in model.parameters()]
    saved = provisional_step([sgd, adam], factor=0.25, clip_norm=0.1)
    for p, was, gradient in zip(first, before, gradients):
        torch.testing.assert_close(p.detach(), was - gradient * 0.1 / norm, rtol=1e-5, atol=1e-9)
    saved.put_back()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before))
    assert not adam.state


def test_no_step_from_gradients_that_weigh_nothing_or_are_not_finite():
    """Nor from none at all. Under "step" what is not finite is stepped with, as in the true update."""
    for factor, bad, nonfinite, made in (
        (None, 1.0, "step", False),
        (1.0, float("nan"), "skip", False),
        (1.0, float("inf"), "raise", False),
        (1.0, float("nan"), "step", True),
        (1.0, 1.0, "skip", True),
    ):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = copy.deepcopy(model.state_dict())
        give(model.parameters(), 1)
        model[0].bias.grad[1] = bad
        saved = provisional_step([optimizer], factor=factor, clip_norm=1.0, nonfinite=nonfinite)
        assert (saved is not None) == made
        assert all(p.grad is None for p in model.parameters())
        if not made:
            assert_alike(dict(model.state_dict()), dict(before))
            assert not optimizer.state
    assert provisional_step([optimizer], factor=1.0) is None


def test_step_hooks_random_numbers_and_schedulers_do_not_notice():
    """Hooks of the optimizer and of all optimizers run at true steps only; warnings are errors here."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    post = optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    everyone = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("all pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all post")),
    ]
    try:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        state = torch.get_rng_state()
        give(model.parameters(), 1)
        saved = provisional_step([optimizer], factor=1.0)
        assert seen == []
        assert torch.equal(state, torch.get_rng_state())
        saved.put_back()
        give(model.parameters(), 1)
        optimizer.step()
        scheduler.step()
        assert sorted(seen) == ["all post", "all pre", "post", "pre"]
        post.remove()
        optimizer.step()
        assert len(seen) == 7, "handles still remove"
    finally:
        for one in everyone:
            one.remove()


def test_random_numbers_of_a_step_are_not_missed_by_others():
    model = small_model()
    optimizer = SOME["nested"](list(model.parameters()))
    give(model.parameters(), 1)
    state = torch.get_rng_state()
    assert provisional_step([optimizer], factor=1.0) is not None
    assert torch.equal(state, torch.get_rng_state())


def test_what_the_user_sets_in_a_group_meanwhile_stays():
    """A learning rate that the step did not touch, and a counter that it did."""
    model = small_model()
    optimizer = Counting(list(model.parameters()))
    group = optimizer.param_groups[0]
    give(model.parameters(), 1)
    saved = provisional_step([optimizer], factor=1.0)
    assert (group["k"], group["late"], group["history"], float(group["total"])) == (1, 1, [1], 1.0)
    group["lr"], group["k"] = 0.7, 12
    saved.put_back()
    assert (group["lr"], group["k"], group["history"], float(group["total"])) == (0.7, 12, [], 0.0)
    assert "late" not in group


def test_a_step_that_raises_is_undone():
    class Failing(Counting):
        def step(self, closure=None):
            super().step()
            self.state[self.param_groups[0]["params"][0]]["x"] = 1
            raise ZeroDivisionError

    model = small_model()
    optimizer = Failing(list(model.parameters()))
    before, groups = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    give(model.parameters(), 1)
    with pytest.raises(ZeroDivisionError):
        provisional_step([optimizer], factor=1.0)
    assert_alike(dict(model.state_dict()), dict(before))
    assert_alike(optimizer.state_dict(), groups)
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_are_not_copied_and_memory_serves_again():
    model = small_model()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    give([p for p in model.parameters() if p.requires_grad], 1)
    optimizer.step()
    one = Saved.of([optimizer])
    assert all(tensor is not model[0].weight for tensor in one.copies.tensors)
    assert len(one.copies.tensors) == 3 + 3 * 3
    two = Saved.of([optimizer], one)
    assert {c.data_ptr() for c in two.copies.copies} == {c.data_ptr() for c in one.copies.copies}


def test_wrapped_optimizers_step_inside():
    accelerate = pytest.importorskip("accelerate")
    model = small_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.AdamW(model.parameters())
        wrapped = accelerate.Accelerator(cpu=True).prepare(optimizer)
    assert wrapped is not optimizer and bare_optimizer(wrapped) is optimizer
    give(model.parameters(), 1)
    saved = provisional_step([wrapped], factor=1.0)
    assert len(optimizer.state) == 4
    saved.put_back()
    assert not optimizer.state
