"""The decorator on one process: whose windows, what comes back, the boundary in its order."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import warnings
import weakref
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import gradsync
from gradsync import GradSyncError, LossSum, accumulating
from tests.support.reference import Recorder, assert_equal_updates, mean_loss, micro_batch, small_model, sum_loss, train


def window_of(size, steps):
    return [[(0, i) for i in range(a, min(a + steps, size))] for a in range(0, size, steps)]


def mean_of(model, window):
    return sum(mean_loss(model, micro_batch(0, i)) for _, i in window) / len(window)


@accumulating(steps=2)
def module_level_step(model, optimizer, x):
    """Docstring."""
    return mean_loss(model, x)


# -- what comes back ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor


@dataclass
class Output:
    loss: torch.Tensor
    logits: object = None


Named = namedtuple("Named", "loss rest")
Pair = namedtuple("Pair", "first second")


class Readonly:
    def __init__(self, loss):
        self._loss = loss

    @property
    def loss(self):
        return self._loss


SHAPES = {
    "tensor": (lambda l: l, lambda r: r),
    "tuple": (lambda l: (l, "x"), lambda r: r[0]),
    "list": (lambda l: [l, "x"], lambda r: r[0]),
    "dict": (lambda l: {"loss": l}, lambda r: r["loss"]),
    "mappingproxy": (lambda l: types.MappingProxyType({"loss": l}), lambda r: r["loss"]),
    "object": (lambda l: Output(l), lambda r: r.loss),
    "frozen": (lambda l: Frozen(l), lambda r: r.loss),
    "named": (lambda l: Named(l, 1), lambda r: r.loss),
    "named by place": (lambda l: Pair(l, 1), lambda r: r.first),
    "property": (lambda l: Readonly(l), lambda r: r.loss),
    "LossSum": (lambda l: LossSum(l, 1), lambda r: r.loss),
    "LossSum in a dict": (lambda l: {"loss": LossSum(l, 1)}, lambda r: r["loss"].loss),
}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_object_comes_back_its_loss_detached(shape, view):
    pack, unpack = SHAPES[shape]
    returned = []

    @accumulating(steps=2)
    def step(model, optimizer, x):
        loss = mean_loss(model, x)
        loss = loss.reshape(1)[0] if view else loss
        returned.append(pack(loss))
        return returned[-1]

    model = small_model()
    optimizer = Recorder(model.parameters())
    values = []
    for i in range(2):
        result = step(model, optimizer, micro_batch(0, i))
        loss = unpack(result)
        assert loss.grad_fn is None and not loss.requires_grad
        values.append(loss.item())
        if not view:
            assert result is returned[-1]
        elif shape not in {"tensor", "tuple", "LossSum"}:
            assert result is returned[-1]
    expected, _ = train(small_model(), window_of(2, 2), mean_of)
    assert_equal_updates(optimizer.seen, expected)
    assert values[0] == pytest.approx(mean_loss(small_model(), micro_batch(0, 0)).item(), abs=0)


def test_a_one_element_loss_will_do():
    @accumulating(steps=1)
    def step(model, optimizer, x):
        return mean_loss(model, x).reshape(1)

    model = small_model()
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 0))
    assert_equal_updates(optimizer.seen, train(small_model(), window_of(1, 1), mean_of)[0])


# -- who takes part -----------------------------------------------------------------------------------------------


def test_participants_are_found_by_type_wherever_they_stand():
    @accumulating(steps=2)
    def step(x, *, net, opt):
        return mean_loss(net, x)

    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in range(2):
        step(micro_batch(0, i), opt=optimizer, net=model)
    assert_equal_updates(optimizer.seen, train(small_model(), window_of(2, 2), mean_of)[0])


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
    assert_equal_updates(optimizer.seen, train(small_model(), window_of(2, 2), mean_of)[0])


class Trainer:
    def __init__(self):
        self.model = small_model()
        self.optimizer = Recorder(self.model.parameters())

    @accumulating(steps=2, model=lambda self, *_: self.model, optimizer=lambda self, *_: self.optimizer)
    def train_step(self, x):
        """A method."""
        return mean_loss(self.model, x)


class Slotted(Trainer):
    __slots__ = ("model", "optimizer")


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
        assert_equal_updates(optimizer.seen, train(small_model(), window_of(3, 3), mean_of)[0])


def test_several_optimizers_step_together_and_are_clipped_by_one_norm():
    model = small_model()
    first, second = Recorder(model[0].parameters()), Recorder(model[2].parameters())

    @accumulating(steps=2, clip_norm=0.01)
    def step(model, optimizers, x):
        return mean_loss(model, x)

    step = accumulating(steps=2, clip_norm=0.01, optimizer=(first, second))(lambda model, x: mean_loss(model, x))
    for i in range(2):
        step(model, micro_batch(0, i))
    (expected,), _ = train(small_model(), window_of(2, 2), mean_of)
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
    assert_equal_updates(optimizer.seen, train(small_model(), window_of(2, 2), mean_of)[0])


# -- windows ------------------------------------------------------------------------------------------------------


def test_steps_may_be_a_function_of_the_windows_number():
    asked = []

    def steps(window):
        asked.append(window)
        return 1 + window

    step = accumulating(steps=steps)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in range(6):
        step(model, optimizer, micro_batch(0, i))
    expected, _ = train(small_model(), [[(0, 0)], [(0, 1), (0, 2)], [(0, 3), (0, 4), (0, 5)]], mean_of)
    assert_equal_updates(optimizer.seen, expected)
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("tail", ["step", "drop", "carry"])
@pytest.mark.parametrize("how", ["over", "flush"])
def test_tails(tail, how):
    step = accumulating(steps=4, tail=tail)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    for epoch in range(2):
        data = [micro_batch(0, 6 * epoch + i) for i in range(6)]
        if how == "over":
            for x in step.over(data):
                step(model, optimizer, x)
        else:
            for x in data:
                step(model, optimizer, x)
            if tail != "carry" or epoch == 1:
                step.flush()
    windows = {
        "step": [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]],
        "drop": [[0, 1, 2, 3], [6, 7, 8, 9]],
        "carry": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
    }[tail]
    expected, _ = train(small_model(), [[(0, i) for i in w] for w in windows], mean_of)
    assert_equal_updates(optimizer.seen, expected)
    assert all(p.grad is None for p in model.parameters())
    assert step.progress.skipped == (2 if tail == "drop" else 0)


def test_over_counts_calls_and_not_items():
    """Items that the loop passes over are no micro-batches, the last one included."""
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in step.over(range(6)):
        if i % 2 == 0:
            step(model, optimizer, micro_batch(0, i))
    expected, _ = train(small_model(), [[(0, 0), (0, 2)], [(0, 4)]], mean_of)
    assert_equal_updates(optimizer.seen, expected)


def test_over_allows_several_calls_an_item():
    step = accumulating(steps=4)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in step.over(range(3)):
        step(model, optimizer, micro_batch(0, 2 * i))
        step(model, optimizer, micro_batch(0, 2 * i + 1))
    assert_equal_updates(optimizer.seen, train(small_model(), window_of(6, 4), mean_of)[0])


def test_over_is_sized_if_the_iterable_was_and_leaving_it_early_keeps_the_window_open():
    step = accumulating(steps=4)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    assert len(step.over([1, 2, 3])) == 3
    with pytest.raises(TypeError):
        len(step.over(iter([1])))
    for i in step.over(range(10)):
        step(model, optimizer, micro_batch(0, i))
        if i == 5:
            break
    assert step.progress.index == 2 and step.progress.updates == 1
    step.flush()
    assert_equal_updates(optimizer.seen, train(small_model(), window_of(6, 4), mean_of)[0])
    step.flush()  # nothing to do is fine
    assert step.progress.updates == 2


@pytest.mark.parametrize("length", range(9))
def test_over_of_several_functions_nests(length):
    """One look-ahead serves them all: that of the outer one would end the inner one an item too soon."""
    pairs = []
    for steps in (4, 3):
        model = small_model()
        step = accumulating(steps=steps)(lambda model, optimizer, x: mean_loss(model, x))
        pairs.append((step, model, Recorder(model.parameters())))
    (one, *a), (two, *b) = pairs
    nested = one.over(two.over(range(length)))
    assert len(nested) == length
    for i in nested:
        one(*a, micro_batch(0, i))
        two(*b, micro_batch(0, i))
    for (_, _, optimizer), steps in zip(pairs, (4, 3)):
        assert_equal_updates(optimizer.seen, train(small_model(), window_of(length, steps), mean_of)[0])


def test_over_is_one_item_ahead_and_the_last_call_is_the_boundary():
    taken = []

    def loader():
        for i in range(3):
            taken.append(i)
            yield i

    step = accumulating(steps=4)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    stepped = []
    for i in step.over(loader()):
        assert len(taken) == min(3, i + 2)
        step(model, optimizer, micro_batch(0, i))
        stepped.append(step.progress.stepped)
    assert stepped == [False, False, True]


def test_reset_discards_what_is_open():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 9))
    step.reset()
    assert all(p.grad is None for p in model.parameters())
    for i in range(2):
        step(model, optimizer, micro_batch(0, i))
    assert_equal_updates(optimizer.seen, train(small_model(), window_of(2, 2), mean_of)[0])


def test_an_exception_discards_the_window_and_goes_on():
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x) / (0 if x is None else 1))
    model = small_model()
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 9))
    with pytest.raises(TypeError):
        step(model, optimizer, None)
    assert all(p.grad is None for p in model.parameters()) and step.progress.index == 0
    for i in range(3):
        step(model, optimizer, micro_batch(0, i))
    assert_equal_updates(optimizer.seen, train(small_model(), window_of(3, 3), mean_of)[0])


class Bad(Exception):
    pass


@pytest.mark.parametrize("bad", [{1}, {3}, {0, 3}, {0, 1, 2, 3}])
def test_skip_drops_one_micro_batch_and_keeps_the_mean_exact(bad):
    @accumulating(steps=4, skip=Bad)
    def step(model, optimizer, i):
        if i in bad:
            raise Bad
        return mean_loss(model, micro_batch(0, i))

    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in range(4):
        assert (step(model, optimizer, i) is None) == (i in bad)
    good = [[(0, i) for i in range(4) if i not in bad]]
    assert_equal_updates(optimizer.seen, train(small_model(), good if good[0] else [], mean_of)[0])
    assert step.progress.dropped == len(bad) and step.progress.window == 1


# -- sums ---------------------------------------------------------------------------------------------------------


def test_loss_sum_weighs_by_count():
    rows = [1, 5, 2, 4, 3]
    step = accumulating(steps=2)(lambda model, optimizer, x: LossSum(sum_loss(model, x), x.numel()))
    model = small_model()
    optimizer = Recorder(model.parameters())
    for i in step.over(range(5)):
        step(model, optimizer, micro_batch(0, i, rows[i]))

    def whole(model, window):
        xs = [micro_batch(0, i, rows[i]) for _, i in window]
        return sum_loss(model, torch.cat(xs)) / sum(x.numel() for x in xs)

    assert_equal_updates(optimizer.seen, train(small_model(), window_of(5, 2), whole)[0])


@pytest.mark.parametrize("count", [lambda n: n, float, torch.tensor])
def test_counts_may_be_ints_floats_and_tensors_and_zero(count):
    step = accumulating(steps=2)(lambda model, optimizer, x, n: LossSum(sum_loss(model, x) * (n > 0), count(n)))
    model = small_model()
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 0), 0)
    step(model, optimizer, micro_batch(0, 1), 12)
    before = copy.deepcopy(model.state_dict())
    step(model, optimizer, micro_batch(0, 0), 0)
    step(model, optimizer, micro_batch(0, 1), 0)  # counts that add up to zero: no update
    expected, _ = train(small_model(), [[(0, 1)]], lambda m, w: sum_loss(m, micro_batch(0, 1)) / 12)
    assert_equal_updates(optimizer.seen, expected)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    assert step.progress.skipped == 1 and step.progress.window == 2


def test_counts_of_zero_in_sync_every_leave_no_gradient():
    model = small_model()
    for step, x in gradsync.sync_every(model, 2, [micro_batch(0, i) for i in range(2)]):
        step.backward(sum_loss(model, x) * 0, count=0)
    assert all(p.grad is None for p in model.parameters())


# -- the boundary -------------------------------------------------------------------------------------------------


def test_the_scheduler_steps_once_a_window():
    step = accumulating(steps=3)(lambda model, optimizer, scheduler, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for i in step.over(range(7)):
        step(model, optimizer, scheduler, micro_batch(0, i))
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_a_window_with_an_inf_and_the_scheduler_waits(fused):
    model = small_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    @accumulating(steps=2)
    def step(model, optimizer, scheduler, scaler, x, factor):
        return mean_loss(model, x) * factor

    before = copy.deepcopy(model.state_dict())
    for i, factor in enumerate([1.0, float("inf")]):
        step(model, optimizer, scheduler, scaler, micro_batch(0, i, dtype=torch.float32), factor)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    assert not step.progress.stepped and step.progress.skipped == 1 and step.progress.updates == 0
    assert optimizer.param_groups[0]["lr"] == 0.1 and scaler.get_scale() == 512.0
    for i in range(2):
        step(model, optimizer, scheduler, scaler, micro_batch(0, i, dtype=torch.float32), 1.0)
    assert step.progress.stepped and step.progress.updates == 1
    assert optimizer.param_groups[0]["lr"] == 0.05
    _, expected = train(small_model(torch.float32), window_of(2, 2), lambda m, w: sum(
        mean_loss(m, micro_batch(0, i, dtype=torch.float32)) for _, i in w) / len(w))
    for p, q in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(p, q)


def test_amp_clips_what_is_unscaled():
    model = small_model()
    optimizer = Recorder(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    step = accumulating(steps=2, clip_norm=0.01)(lambda model, optimizer, scaler, x: mean_loss(model, x))
    for i in range(2):
        step(model, optimizer, scaler, micro_batch(0, i))
    (expected,), _ = train(small_model(), window_of(2, 2), mean_of)
    norm = torch.cat([g.flatten() for g in expected]).norm()
    assert step.progress.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert_equal_updates(optimizer.seen, [[g * (0.01 / (norm + 1e-6)) for g in expected]], 1e-6)


@pytest.mark.parametrize("nonfinite", ["step", "skip", "raise"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nonfinite(nonfinite, poison):
    step = accumulating(steps=2, nonfinite=nonfinite)(lambda model, optimizer, x, f: mean_loss(model, x) * f)
    model = small_model()
    optimizer = Recorder(model.parameters(), momentum=0.9)
    step(model, optimizer, micro_batch(0, 0), 1.0)
    if nonfinite == "raise":
        with pytest.raises(GradSyncError, match="must be finite under nonfinite='raise'"):
            step(model, optimizer, micro_batch(0, 1), poison)
    else:
        step(model, optimizer, micro_batch(0, 1), poison)
    finite = all(p.isfinite().all() for p in model.parameters())
    assert finite == (nonfinite != "step")
    assert all(p.grad is None for p in model.parameters())
    if finite:
        assert not optimizer.state and step.progress.skipped == 1
        for i in range(2):
            step(model, optimizer, micro_batch(0, i), 1.0)
        assert_equal_updates(optimizer.seen, train(small_model(), window_of(2, 2), mean_of)[0])


def test_the_trainable_parameters_are_read_as_each_window_opens():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 0))
    step(model, optimizer, micro_batch(0, 1))
    assert optimizer.seen[0][0] is None
    model[0].requires_grad_(True)
    step(model, optimizer, micro_batch(0, 0))
    step(model, optimizer, micro_batch(0, 1))
    assert optimizer.seen[1][0] is not None
    step(model, optimizer, micro_batch(0, 0))
    model[0].requires_grad_(False)
    with pytest.raises(GradSyncError, match="must stay the same within a window"):
        step(model, optimizer, micro_batch(0, 1))


# -- progress -----------------------------------------------------------------------------------------------------


def test_progress_is_a_frozen_record():
    step = accumulating(steps=3)(lambda model, optimizer, x: mean_loss(model, x))
    assert step.progress.micro_steps == 0 and step.progress.loss is None
    model = small_model()
    optimizer = Recorder(model.parameters())
    records, losses = [], []
    for i in step.over(range(5)):
        losses.append(step(model, optimizer, micro_batch(0, i)).clone())
        records.append(step.progress)
    assert [r.micro_steps for r in records] == [1, 2, 3, 4, 5]
    assert [r.window for r in records] == [0, 0, 1, 1, 2]
    assert [r.index for r in records] == [1, 2, 0, 1, 0]
    assert [r.updates for r in records] == [0, 0, 1, 1, 2]
    assert [r.stepped for r in records] == [False, False, True, False, True]
    assert {r.size for r in records} == {3}
    assert records[2].loss.item() == pytest.approx(sum(losses[:3]).item() / 3, rel=1e-12)
    assert records[3].loss.item() == records[2].loss.item()
    assert records[4].loss.item() == pytest.approx(sum(losses[3:]).item() / 2, rel=1e-12)
    with pytest.raises(AttributeError):
        records[0].micro_steps = 7


def test_writing_to_the_returned_loss_leaves_progress_alone():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    total = 0.0
    for i in range(2):
        loss = step(model, optimizer, micro_batch(0, i))
        total += loss.item()
        loss.zero_()
    assert step.progress.loss.item() == pytest.approx(total / 2, rel=1e-12)


# -- the function itself ------------------------------------------------------------------------------------------


def test_the_decorated_function_keeps_its_name_doc_and_type():
    import inspect

    assert module_level_step.__name__ == "module_level_step" and module_level_step.__doc__ == "Docstring."
    assert list(inspect.signature(module_level_step).parameters) == ["model", "optimizer", "x"]
    assert isinstance(module_level_step, types.FunctionType)
    assert list(inspect.signature(Trainer().train_step).parameters) == ["x"]


def test_copying_and_pickling_are_those_of_a_function():
    assert copy.copy(module_level_step) is module_level_step
    assert copy.deepcopy({"step": module_level_step})["step"] is module_level_step
    assert pickle.loads(pickle.dumps(module_level_step)) is module_level_step
    trainer = Trainer()
    trainer.train_step(micro_batch(0, 0))
    twin = copy.deepcopy(trainer)
    assert twin.train_step.progress.micro_steps == 0
    trainer.train_step.reset()
    bound = pickle.loads(pickle.dumps(trainer.train_step))
    assert bound.__name__ == "train_step" and type(bound.__self__) is Trainer


def test_the_model_can_be_copied_and_pickled_at_any_time():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    attributes, keys = set(vars(model)), list(model.state_dict())
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 0))
    copy.deepcopy(model), pickle.dumps(model), copy.deepcopy(optimizer.state_dict())
    assert set(vars(model)) == attributes and list(model.state_dict()) == keys
    step.reset()


def test_dropping_model_and_optimizer_frees_everything():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4):
        step(model, optimizer, micro_batch(0, i))
    refs = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        assert [ref() for ref in refs] == [None, None, None]
    finally:
        gc.enable()


def test_a_window_left_open_is_warned_about_when_its_function_ends():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    step(model, optimizer, micro_batch(0, 0))
    with pytest.warns(RuntimeWarning, match=r"1 of 2 micro-batches .*\.over\(\.\.\.\).*\.flush\(\)"):
        del step
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = accumulating(steps=1)(lambda model, optimizer, x: mean_loss(model, x))
        optimizer.zero_grad()
        step(model, optimizer, micro_batch(0, 0))
        del step
        gc.collect()


def test_profiler_ranges():
    step = accumulating(steps=2)(lambda model, optimizer, x: mean_loss(model, x))
    model = small_model()
    optimizer = Recorder(model.parameters())
    with torch.profiler.profile() as profile:
        for i in range(4):
            step(model, optimizer, micro_batch(0, i))
        for micro, x in gradsync.sync_every(model, 2, [micro_batch(0, i) for i in range(2)]):
            micro.backward(mean_loss(model, x))
    counts = {e.key: e.count for e in profile.key_averages() if e.key.startswith("gradsync.")}
    assert counts == {"gradsync.hold": 3, "gradsync.sync": 3, "gradsync.update": 2}


def test_no_allocation_grows_with_the_number_of_windows():
    step = accumulating(steps=4)(lambda model, optimizer, x: model(x).sum())
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(1, 1)
    for _ in range(100):
        step(model, optimizer, x)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(2000):
        step(model, optimizer, x)
    gc.collect()
    assert abs(len(gc.get_objects()) - before) < 20
