"""Schedulers and optimizers of other makes, participants that are hidden in a list or a dict, and `on_update`."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR

from gradsync import GradSyncError, accumulating
from tests.changes.rule import Outcome, Run, exact_or_error, my_rank, told
from tests.support.models import small_model
from tests.support.reference import mean_loss, micro_batch

STEPS = 2


class TimmScheduler:
    """timm's, in what matters: no `LRScheduler`, a `step` that needs an epoch, a `step_update` that needs a number."""

    def __init__(self, optimizer: torch.optim.Optimizer, t_in_epochs: bool) -> None:
        self.optimizer, self.t_in_epochs = optimizer, t_in_epochs
        self.base_values = [group["lr"] for group in optimizer.param_groups]
        self.updates: list[int] = []

    def _set(self, t: int) -> None:
        for group, value in zip(self.optimizer.param_groups, self.base_values):
            group["lr"] = value * 0.5**t

    def step(self, epoch: int, metric: float | None = None) -> None:
        if self.t_in_epochs:
            self._set(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.updates.append(num_updates)
        if not self.t_in_epochs:
            self._set(num_updates)

    def state_dict(self) -> dict:
        return {key: value for key, value in vars(self).items() if key != "optimizer"}


class Duck:
    """The least that is a scheduler: a `step`, and the optimizer that it moves."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


class Needy(Duck):
    """Needs what a boundary does not have."""

    def step(self, loss: float) -> None:
        super().step()


def lrs_after(updates: int, optimizer, call) -> list[float]:
    seen = []
    for i in range(updates * STEPS):
        call(micro_batch(my_rank(), i))
        if i % STEPS == STEPS - 1:
            seen.append(optimizer.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("make", [Duck, lambda o: TimmScheduler(o, t_in_epochs=False), lambda o: StepLR(o, 1, 0.5)])
def test_a_scheduler_of_any_make_moves_once_an_update(make, named):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make(optimizer)
    if named:
        step = accumulating(steps=STEPS, scheduler=scheduler)(lambda model, optimizer, x: mean_loss(model, x))
        call = lambda x: step(model, optimizer, x)  # noqa: E731
    else:
        step = accumulating(steps=STEPS)(lambda model, optimizer, scheduler, x: mean_loss(model, x))
        call = lambda x: step(model, optimizer, scheduler, x)  # noqa: E731
    assert lrs_after(3, optimizer, call) == pytest.approx([0.05, 0.025, 0.0125])


def test_timms_scheduler_is_told_the_number_of_the_update():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = TimmScheduler(optimizer, t_in_epochs=False)
    step = accumulating(steps=STEPS)(lambda model, optimizer, scheduler, x: mean_loss(model, x))
    lrs_after(3, optimizer, lambda x: step(model, optimizer, scheduler, x))
    assert scheduler.updates == [1, 2, 3]


def test_timms_scheduler_in_epochs_is_its_users():
    """timm's loops call `step(epoch)` themselves; what gradsync adds must not undo it, or it says that it cannot."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = TimmScheduler(optimizer, t_in_epochs=True)
    step = accumulating(steps=STEPS)(lambda model, optimizer, scheduler, x: mean_loss(model, x))
    seen = []
    try:
        for epoch in range(3):
            lrs_after(2, optimizer, lambda x: step(model, optimizer, scheduler, x))
            scheduler.step(epoch + 1)
            seen.append(optimizer.param_groups[0]["lr"])
    except (TypeError, GradSyncError) as error:
        assert "step" in str(error) and "epoch" in str(error), error
    else:
        assert seen == pytest.approx([0.05, 0.025, 0.0125])


def test_a_scheduler_of_another_make_that_needs_an_argument_is_a_type_error():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Needy(optimizer)
    step = accumulating(steps=1)(lambda model, optimizer, scheduler, x: mean_loss(model, x))
    with pytest.raises(TypeError, match="step"):
        step(model, optimizer, scheduler, micro_batch(0, 0))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_scheduler_of_another_optimizer_is_no_participant_without_a_word():
    """Its optimizer is not stepped here: an error, or it stays where it is; never moved by somebody else's update."""
    model, other = small_model(), small_model()
    optimizer, elsewhere = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    step = accumulating(steps=1)(lambda model, optimizer, scheduler, x: mean_loss(model, x))
    with pytest.raises((TypeError, ValueError, GradSyncError), match=r"[Ss]cheduler"):
        step(model, optimizer, Duck(elsewhere), micro_batch(0, 0))


# -- hidden in a container ----------------------------------------------------------------------------------------

HIDING = {
    "list": lambda one: [one], "tuple": lambda one: (one,), "dict": lambda one: {"it": one}, "nested": lambda one: {"a": [one]},
}  # fmt: skip
HIDDEN = {
    "optimizer": lambda optimizer, other: other,
    "StepLR": lambda optimizer, other: StepLR(optimizer, 1, 0.5),
    "timm": lambda optimizer, other: TimmScheduler(optimizer, t_in_epochs=False),
    "duck": lambda optimizer, other: Duck(optimizer),
    "scaler": lambda optimizer, other: torch.amp.GradScaler("cpu"),
}


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("hide", HIDING)
@pytest.mark.parametrize("what", HIDDEN)
def test_a_participant_in_a_container_is_an_error(what, hide, keyword):
    """Never passed over: the second optimizer would not step, the learning rate would not move."""
    model = small_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    hidden = HIDING[hide](HIDDEN[what](optimizer, torch.optim.SGD(model[2].parameters(), lr=0.1)))
    step = accumulating(steps=1)(lambda model, optimizer, x, rest=None: mean_loss(model, x))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((TypeError, GradSyncError)) as raised:
        step(model, optimizer, micro_batch(0, 0), **{"rest": hidden}) if keyword else step(
            model, optimizer, micro_batch(0, 0), hidden)  # fmt: skip
    kind = {"optimizer": "optimizer", "scaler": "scaler"}.get(what, "scheduler")
    assert kind in str(raised.value).lower(), raised.value
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_container_whose_participants_are_named_is_none():
    model = small_model()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    schedulers = {"it": StepLR(optimizers[0], 1, 0.5)}
    step = accumulating(
        steps=1, optimizer=lambda model, optimizers, *_: tuple(optimizers), scheduler=lambda m, o, s, x: tuple(s.values())
    )(lambda model, optimizers, schedulers, x: mean_loss(model, x))
    before = [p.detach().clone() for p in model.parameters()]
    step(model, optimizers, schedulers, micro_batch(0, 0))
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert [o.param_groups[0]["lr"] for o in optimizers] == [0.05, 0.1]


def test_batches_of_tensors_in_containers_are_data():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = accumulating(steps=1)(lambda model, optimizer, batch: mean_loss(model, batch["x"][0]))
    step(model, optimizer, {"x": [micro_batch(0, 0)], "names": ["a"], "n": 1, "optimizer": "adam"})
    assert step.progress.updates == 1


# -- Accelerate and Fabric ----------------------------------------------------------------------------------------


def accelerator(steps: int = 1):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state() if state is not GradientState else state._shared_state.clear()
    return Accelerator(cpu=True, gradient_accumulation_steps=steps)


def fabric():
    from lightning_fabric import Fabric

    made = Fabric(accelerator="cpu", devices=1)
    made.launch()
    return made


def accelerate() -> tuple:
    """What prepares a model, perhaps with its optimizer, and what prepares an optimizer alone."""
    with_it = accelerator()
    return with_it.prepare, with_it.prepare


def lightning() -> tuple:
    with_it = fabric()
    return with_it.setup, with_it.setup_optimizers


def optimizer_alone(run: Run, _, prepare_optimizer) -> None:
    run.optimizer = prepare_optimizer(run.optimizer)


def model_alone(run: Run, prepare, _) -> None:
    run.models = [prepare(run.model)]


def both(run: Run, prepare, _) -> None:
    model, run.optimizer = prepare(run.model, run.optimizer)
    run.models = [model]


def prepared(maker, prepare, steps: int) -> Outcome:
    """Their models, optimizers or both in the decorated function: exact."""

    def story(run: Run) -> None:
        if run.how != "reference":
            prepare(run, *maker())
        names = dict(run.model.named_parameters())
        run.tracked = lambda: names
        run.train(3)

    return told(story, "accumulating", "bare", steps)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("prepare", [optimizer_alone, model_alone, both])
@pytest.mark.parametrize("maker", [accelerate, lightning])
def test_wrapped_models_and_optimizers_work(ranks, maker, prepare, steps):
    for size in (1, 2):
        exact_or_error(ranks(size).run(prepared, maker, prepare, steps, limit=20), only="exact")


def accelerates_scheduler() -> tuple[list[float], list[float]]:
    """The learning rates with the scheduler that Accelerate wrapped: what calling it by hand at each update gives."""
    seen = []
    for by_hand in (True, False):
        with_it = accelerator()
        model = small_model()
        raw = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, scheduler = with_it.prepare(model, raw, LambdaLR(raw, lambda t: 0.9**t))
        step = accumulating(steps=STEPS)(lambda model, optimizer, scheduler, x: mean_loss(model, x))
        if by_hand:
            here = []
            for i in range(3):
                with_it.backward(mean_loss(model, micro_batch(my_rank(), i)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                here.append(raw.param_groups[0]["lr"])
            seen.append(here)
        else:
            seen.append(lrs_after(3, raw, lambda x: step(model, optimizer, scheduler, x)))
    return tuple(seen)


def test_accelerates_scheduler_moves_as_by_hand(ranks):
    for size in (1, 2):
        for by_hand, ours in ranks(size).run(accelerates_scheduler, limit=20):
            assert ours == pytest.approx(by_hand) and ours[2] < 0.1


# -- on_update ----------------------------------------------------------------------------------------------------


def updates_seen(lengths: list[int], data, wrap: str) -> dict:
    """An EMA and a learning rate of the user's own, made in `on_update`; ranks of different lengths."""
    run = Run("accumulating", wrap, 3)
    ema = [p.detach().clone() for p in run.model.parameters()]
    told_of, between = [], []

    def after(progress):
        told_of.append((progress.updates, progress.window, progress.stepped, len(between)))
        for mine, p in zip(ema, run.model.parameters()):
            assert p.grad is None
            mine.lerp_(p.detach(), 0.5)
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.5

    @accumulating(steps=3, on_update=after)
    def train_step(model, optimizer, x):
        return mean_loss(model, x[:, :3])

    rank = my_rank()
    home = run._home(run.model)
    for x in train_step.over(data([micro_batch(rank, i) for i in range(lengths[rank])])):
        between.append(1)
        train_step(home, run.optimizer, x)
    return {
        "told": [one[:3] for one in told_of],
        "after the loop": sum(calls == lengths[rank] for *_, calls in told_of),
        "ema": torch.cat([e.flatten() for e in ema]).tolist(),
        "parameters": torch.cat([p.detach().flatten() for p in run.model.parameters()]).tolist(),
        "lr": run.optimizer.param_groups[0]["lr"],
        "updates": train_step.progress.updates,
    }


@pytest.mark.parametrize("data", [list, iter], ids=["sized", "not sized"])
@pytest.mark.parametrize("wrap", ["bare", "ddp"])
@pytest.mark.parametrize("lengths", [[9, 9], [9, 2], [3, 7], [4, 8]])
def test_on_update_is_called_on_every_rank_after_each_update(ranks, lengths, wrap, data):
    seen = ranks(2).run(updates_seen, lengths, data, wrap, limit=20)
    windows = -(-max(lengths) // 3)
    for one in seen:
        assert one["told"] == [(n + 1, n + 1, True) for n in range(windows)]
        assert one["updates"] == windows and one["lr"] == pytest.approx(0.1 * 0.5**windows)
        assert one["ema"] == pytest.approx(seen[0]["ema"], abs=1e-15)
        assert one["parameters"] == pytest.approx(seen[0]["parameters"], abs=1e-15)


def trainer(log: list):
    """A class whose step is a method; made in here, so that a library without `on_update` fails in this test alone."""

    class Trainer:
        def __init__(self) -> None:
            self.model = small_model()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def after(self, progress) -> None:
            log.append((self, progress.updates))

        @accumulating(steps=2, model=lambda s, *_: s.model, optimizer=lambda s, *_: s.optimizer, on_update=after)
        def train_step(self, x):
            return mean_loss(self.model, x)

    return Trainer


def test_on_update_of_a_method_gets_its_instance():
    log: list = []
    kind = trainer(log)
    one, two = kind(), kind()
    for i in range(4):
        one.train_step(micro_batch(0, i))
        two.train_step(micro_batch(0, i))
    assert log == [(one, 1), (two, 1), (one, 2), (two, 2)]


def test_on_update_is_not_told_of_windows_that_made_no_update():
    seen = []
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @accumulating(steps=2, nonfinite="skip", on_update=lambda progress: seen.append((progress.updates, progress.window)))
    def step(model, optimizer, x, factor):
        return mean_loss(model, x) * factor

    for i, factor in enumerate([1.0, 1.0, float("nan"), 1.0, 1.0, 1.0, 1.0]):
        step(model, optimizer, micro_batch(0, i), factor)
    step.reset()
    assert [updates for updates, _ in seen] == [1, 2]
    for i in range(3):
        step(model, optimizer, micro_batch(0, i), 1.0)
    step.flush()
    assert [updates for updates, _ in seen] == [1, 2, 3, 4]


def test_on_update_sees_the_update_of_its_own_window():
    """After the step, the schedulers and zero_grad; what it raises reaches the caller."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1, 0.5)
    before = model[0].weight.detach().clone()

    class Enough(Exception):
        pass

    def after(progress):
        assert not torch.equal(before, model[0].weight) and optimizer.param_groups[0]["lr"] == 0.05
        assert progress.updates == 1 and progress.stepped and all(p.grad is None for p in model.parameters())
        raise Enough

    step = accumulating(steps=1, on_update=after)(lambda model, optimizer, scheduler, x: mean_loss(model, x))
    with pytest.raises(Enough):
        step(model, optimizer, scheduler, micro_batch(0, 0))


@pytest.mark.parametrize("wrong", [3, "log"])
def test_on_update_that_cannot_be_called_is_a_type_error(wrong):
    with pytest.raises(TypeError, match="on_update"):
        accumulating(steps=1, on_update=wrong)
