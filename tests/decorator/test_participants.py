"""Whose windows they are: which models and optimizers take part in a call."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync import GradSyncError, accumulating
from tests.support.compare import assert_equal_updates
from tests.support.models import small_model
from tests.support.recorder import Recorder
from tests.support.reference import cut, mean_loss, micro_batch, train, window_mean


def test_participants_are_found_by_type_wherever_they_stand():
    @accumulating(steps=2)
    def step(x, *, net, opt):
        return mean_loss(net, x)

    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in range(2):
        step(micro_batch(0, i), opt=optimizer, net=model)
    assert_equal_updates(optimizer.seen, train(small_model(), cut([2], 2), window_mean)[0])


@pytest.mark.parametrize("naming", ["object", "tuple", "function"])
def test_participants_are_named_by_keyword(naming):
    model = small_model()
    optimizer = Recorder(model.parameters())
    named = {
        "object": (model, optimizer),
        "tuple": ((model,), (optimizer,)),
        "function": (lambda x: model, lambda x: optimizer),
    }[naming]

    @accumulating(steps=2, model=named[0], optimizer=named[1])
    def step(x):
        return mean_loss(model, x)

    for i in range(2):
        step(micro_batch(0, i))
    assert_equal_updates(optimizer.seen, train(small_model(), cut([2], 2), window_mean)[0])


class Trainer:
    def __init__(self):
        self.model = small_model()
        self.optimizer = Recorder(self.model.parameters())

    @accumulating(steps=2, model=lambda self, *_: self.model, optimizer=lambda self, *_: self.optimizer)
    def train_step(self, x):
        """A method."""
        return mean_loss(self.model, x)


@dataclass
class Unhashable(Trainer):
    place: int = 0

    def __post_init__(self):
        Trainer.__init__(self)


@pytest.mark.parametrize("kind", [Trainer, Unhashable])
def test_two_instances_never_share_a_window(kind):
    one, two = kind(), kind()
    one.train_step(micro_batch(0, 0))
    two.train_step(micro_batch(0, 0))
    assert one.train_step.progress.index == two.train_step.progress.index == 1
    assert not one.optimizer.seen and not two.optimizer.seen
    for x in one.train_step.over([micro_batch(0, 1)]):
        one.train_step(x)
    assert len(one.optimizer.seen) == 1 and not two.optimizer.seen
    two.train_step.reset()
    assert one.train_step.progress.updates == 1 and two.train_step.progress.updates == 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = small_model()

    @accumulating(steps=2)
    def train_step(self, optimizer, x):
        return mean_loss(self.inner, x)


def test_the_instance_of_a_method_may_be_the_model():
    model = Net()
    optimizer = Recorder(model.parameters())
    for i in range(2):
        model.train_step(optimizer, micro_batch(0, i))
    assert_equal_updates(optimizer.seen, train(small_model(), cut([2], 2), window_mean)[0])


def test_instances_that_share_an_optimizer_have_their_own_windows():
    one, two = Trainer(), Trainer()
    one.train_step(micro_batch(0, 0))
    two.model, two.optimizer = one.model, one.optimizer
    with pytest.raises(GradSyncError, match="one open window at a time"):
        two.train_step(micro_batch(0, 0))
    one.train_step.reset()


def test_one_function_with_two_models_has_two_windows():
    pairs = []
    for _ in range(2):
        model = small_model()
        pairs.append((model, Recorder(model.parameters())))

    @accumulating(steps=3)
    def step(model, optimizer, x):
        return mean_loss(model, x)

    for i in range(3):
        for model, optimizer in pairs:
            step(model, optimizer, micro_batch(0, i))
    for _, optimizer in pairs:
        assert_equal_updates(optimizer.seen, train(small_model(), cut([3], 3), window_mean)[0])


def test_several_optimizers_step_together_and_are_clipped_by_one_norm():
    model = small_model()
    first, second = Recorder(model[0].parameters()), Recorder(model[2].parameters())

    step = accumulating(steps=2, clip_norm=0.01, optimizer=(first, second))(lambda model, x: mean_loss(model, x))
    for i in range(2):
        step(model, micro_batch(0, i))
    (expected,), _ = train(small_model(), cut([2], 2), window_mean)
    norm = torch.cat([g.flatten() for g in expected]).norm()
    assert step.progress.grad_norm.item() == pytest.approx(norm.item(), rel=1e-12)
    scaled = [[g * (0.01 / (norm + 1e-6)) for g in expected]]
    assert_equal_updates([first.seen[0] + second.seen[0]], scaled)


def test_a_bystander_gets_no_gradient_and_passes_them_on():
    """A GAN's generator step: D judges, G learns."""
    torch.manual_seed(0)
    generator, judge = nn.Linear(2, 3).double(), nn.Linear(3, 1).double()
    judge.bias.requires_grad_(False)
    mine, other = Recorder(generator.parameters()), Recorder(judge.parameters())

    @accumulating(steps=2)
    def step(generator, judge, optimizer, x):
        return judge(generator(x)).square().mean()

    for x in torch.ones(2, 4, 2, dtype=torch.float64):
        step(generator, judge, mine, x)
    assert judge.weight.grad is None
    assert judge.weight.requires_grad and not judge.bias.requires_grad
    assert len(mine.seen) == 1 and mine.seen[0][0].abs().sum() > 0 and not other.seen


def test_a_gans_two_steps_keep_their_own_cadences():
    torch.manual_seed(0)
    g, d = nn.Linear(2, 3), nn.Linear(3, 1)
    opt_g, opt_d = Recorder(g.parameters()), Recorder(d.parameters())

    @accumulating(steps=2)
    def g_step(g, d, opt, x):
        return -d(g(x)).mean()

    @accumulating(steps=3)
    def d_step(g, d, opt, x):
        return d(g(x)).mean()

    for x in torch.ones(6, 4, 2):
        d_step(g, d, opt_d, x)
        g_step(g, d, opt_g, x)
    assert len(opt_g.seen) == 3 and len(opt_d.seen) == 2
    assert all(p.grad is None for p in [*g.parameters(), *d.parameters()])


def test_a_bystander_may_be_checkpointed():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    g, d = nn.Linear(2, 3), nn.Linear(3, 1)
    optimizer = Recorder(g.parameters())

    @accumulating(steps=1)
    def step(g, d, optimizer, x):
        return checkpoint(d, g(x), use_reentrant=False).mean()

    step(g, d, optimizer, torch.ones(4, 2))
    assert len(optimizer.seen) == 1 and d.weight.grad is None and d.weight.requires_grad


def test_a_sub_module_among_the_arguments_is_part_of_its_model():
    model = small_model()
    optimizer = Recorder(model.parameters())

    @accumulating(steps=2)
    def step(model, head, optimizer, x):
        return mean_loss(model, x)

    for i in range(2):
        step(model, model[2], optimizer, micro_batch(0, i))
    assert_equal_updates(optimizer.seen, train(small_model(), cut([2], 2), window_mean)[0])


def refused_on_every_rank():
    """What each of these says."""
    model, optimizer = small_model(), None
    wrapped = DDP(small_model())
    optimizer = torch.optim.SGD([*model.parameters(), *wrapped.parameters()], lr=0.1)
    step = accumulating(steps=2)(lambda model, others, optimizer, x: mean_loss(model, x) + mean_loss(others[0], x))
    told = []
    for evaluating in (False, True):
        try:
            with torch.inference_mode(evaluating):
                step(model, [small_model() if evaluating else wrapped], optimizer, micro_batch(0, 0))
        except GradSyncError as error:
            told.append(str(error))
    return told


def test_a_model_on_an_engine_in_a_container_and_evaluation_are_errors(ranks):
    """The one would synchronise in each backward, and wait for ranks that have run out; the other trains nothing."""
    for container, evaluation in ranks(2).run(refused_on_every_rank):
        assert "a DistributedDataParallel came in a list" in container and "model=" in container
        assert "inference_mode" in evaluation and "__wrapped__" in evaluation
