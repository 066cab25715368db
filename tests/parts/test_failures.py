"""A call that runs out of memory ends with the gradients of one that had the memory, hooks included."""

import logging
import weakref
from collections import OrderedDict

import pytest
import torch

from gradsync import GradSyncError, functional
from gradsync._loss import LossSum
from gradsync.parts import Fit, run_in_parts
from tests.parts.limited import BackwardOf, Limit, Net, assert_same, batch, gradients, mean_loss, opened, run, sum_loss


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """A collection for each failure is what takes the time here; `test_memory.py` has it."""
    monkeypatch.setattr("gradsync.parts.halving.free", lambda: None)


def reference(rows, function, windows=1, prepare=lambda model: None):
    """Plain torch, with the memory."""
    model = Net()
    prepare(model)
    losses = []
    for index in range(windows):
        found = function(model, *batch(rows, seed=index))
        loss = found.loss if isinstance(found, LossSum) else found
        loss.backward()
        losses.append(loss.detach())
    return gradients(model), losses


@pytest.mark.parametrize("function", [mean_loss, sum_loss])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_every_limit(rows, where, function):
    """Every limit, at every depth, on gradients that are there already, ends as with the memory."""
    truth, losses = reference(rows, function, windows=3)
    for limit in range(1, rows + 1):
        for at in range(where == "backward", 4):  # before the first layer nothing has a backward
            model = Net(at=at)
            model.limit, model.where = limit, where
            fit = opened(model)
            for index in range(3):
                outcome = run(model, *batch(rows, seed=index), function=function, fit=fit)
                loss = outcome.returned
                value = loss.loss if function is sum_loss else loss
                torch.testing.assert_close(value, losses[index], rtol=1e-12, atol=1e-12)
                assert not value.requires_grad
                if function is sum_loss:
                    assert loss.count == rows * 5
                if limit < rows:
                    assert outcome.rows <= limit and outcome.parts > 1
                else:
                    assert (outcome.parts, outcome.rows) == (1, rows)
            assert_same(gradients(model), truth)
            # What fits was remembered: only the first call tried more.
            assert all(size > limit for size in model.log) and (limit == rows or model.log[0] == rows)
            assert len(model.log) <= rows


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("limit", [1, 2, 6])
def test_hooks_run_once_with_the_whole_gradient(where, at, limit):
    """Hooks at parameters, neither linear nor free of effects, see each micro-batch's gradient once."""

    def prepare(model, seen=None):
        seen = [] if seen is None else seen
        for index, parameter in enumerate(model.parameters()):
            if index % 2:
                parameter.register_hook(lambda g, i=index: (seen.append((i, g.clone())), g.clamp(-0.01, 0.01))[1])
            if index % 3 == 0:
                parameter.register_post_accumulate_grad_hook(lambda p, i=index: seen.append((-i, p.grad.clone())))
        return seen

    model = Net()
    expected = prepare(model)
    for index in range(3):
        mean_loss(model, *batch(6, seed=index)).backward()
    truth = gradients(model)

    model = Net(at=at)
    seen = prepare(model)
    model.limit, model.where = limit, where
    fit = opened(model)
    for index in range(3):
        run(model, *batch(6, seed=index), fit=fit)
    assert_same(gradients(model), truth)
    order = lambda entry: entry[0]  # noqa: E731
    for third in range(3):
        size = len(expected) // 3
        some, others = (sorted(e[third * size : (third + 1) * size], key=order) for e in (seen, expected))
        assert [i for i, _ in some] == [i for i, _ in others]
        assert_same([g for _, g in some], [g for _, g in others])
    assert len(seen) == len(expected)
    assert [len(p._backward_hooks or ()) for p in model.parameters()] == [i % 2 for i in range(8)]


def test_gradients_that_share_one_tensor():
    """Views of one buffer count their versions together; what has arrived is known all the same."""
    truth, _ = reference(6, mean_loss, windows=2)
    for at in range(1, 4):
        model = Net(at=at)
        flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        views = flat.split([p.numel() for p in model.parameters()])
        for parameter, view in zip(model.parameters(), views):
            parameter.grad = view.view_as(parameter)
        model.limit, model.where = 2, "backward"
        fit = opened(model)
        for index in range(2):
            run(model, *batch(6, seed=index), fit=fit)
            fit.sizes = type(fit.sizes)()  # each call tries the whole
        assert_same(gradients(model), truth)
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_parameter_that_only_some_parts_use():
    """Parts may use different parameters, watched by hooks or not; one that none uses keeps None."""

    def function(model, x, y):
        out = model.layers[1](x)
        if (x[:, 0] > 0).any():
            out = out + model.layers[2](x) * (x[:, :1] > 0)
        return ((out - y) ** 2).mean(dim=1).mean()

    x, y = batch(4)
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    for hooked in (False, True):
        results = []
        for limit in (4, 2, 1):
            model, seen = Net(), []
            if hooked:
                model.layers[2].weight.register_hook(lambda g, seen=seen: seen.append(g.clone()))

            def limited(model, x, y, limit=limit):
                if len(x) > limit:
                    raise MemoryError
                return function(model, x, y)

            run(model, x, y, function=limited)
            results.append(gradients(model))
            assert len(seen) == hooked
        assert_same(results[1], results[0])
        assert_same(results[2], results[0])
        assert results[1][-1] is None


def test_what_the_real_backward_is_told():
    """It runs once a call, with its weight and the loss of the whole micro-batch; others begin at the scaled loss."""
    truth, losses = reference(6, sum_loss)
    for where in ("forward", "backward"):
        model, calls = Net(), []
        model.limit, model.where = 2, where
        run(model, *batch(6), function=sum_loss, scale=1024.0, calls=calls)
        assert_same([g / 1024 for g in gradients(model)], truth)
        ((weight, whole),) = calls
        assert weight == 1.0 and whole.count == 30
        torch.testing.assert_close(whole.loss.detach(), losses[0])


def test_the_error_goes_on_below_one_row():
    """Where a row does not fit, its error goes on; one that is not about memory does at once."""
    model = Net()
    model.limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        run(model, *batch(6))
    assert model.log == [6, 3, 2, 1]
    calls = []

    def function(model, x, y):
        calls.append(len(x))
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        run(model, *batch(6), function=function)
    assert calls == [6]


def test_random_state_is_put_back():
    """A failed attempt draws nothing: a call that failed in its forward is one that ran in those parts from the start."""
    results = []
    for known in (False, True):
        model = Net()
        model.dropout = 0.5
        fit = opened(model)
        if known:
            model.limit = 3
            run(model, *batch(6), fit=fit)
            model.zero_grad()
        else:
            model.limit = 3
        torch.manual_seed(5)
        assert run(model, *batch(6), fit=fit).parts == 2
        results.append((gradients(model), torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0]))
    assert torch.equal(results[0][1], results[1][1])


def test_random_state_is_put_back_after_a_failed_backward():
    """The parts' forwards draw from where the failed one began."""
    model, states = Net(), []
    model.limit, model.where = 3, "backward"

    def function(model, x, y):
        states.append(torch.get_rng_state())
        torch.rand(7)
        return mean_loss(model, x, y)

    run(model, *batch(6), function=function)
    assert torch.equal(states[0], states[1]) and not torch.equal(states[1], states[2])


class Counting(Net):
    def __init__(self, **others):
        super().__init__(**others)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("new", torch.zeros(()))
        self.register_buffer("table", torch.zeros(8))
        self.register_buffer("made_later", None)

    def forward(self, x):
        self.rows += len(x)
        if self.made_later is None:
            self.made_later = torch.ones(len(x))
        self.new = self.new + len(x)
        return super().forward(x)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_buffers_are_put_back(where):
    """Buffers that a failed attempt changed, in place or by another object, are as if it had not been."""
    model = Counting()
    model.limit, model.where = 2, where
    fit = opened(model)
    for index in range(4):
        run(model, *batch(6, seed=index), fit=fit)
        assert model.rows == model.new == 6 * (index + 1)
        assert len(model.made_later) == 2
        fit.sizes = type(fit.sizes)()
        fit.open([model])
    _, copies = fit.state.see()
    assert len(copies) == 3  # the table, which no call changes, is not copied again


def test_a_buffer_that_begins_to_change_is_an_error():
    """What cannot be put back is said."""
    model = Counting()
    fit = opened(model)
    run(model, *batch(6), fit=fit)

    def function(model, x, y):
        model.table += 1
        return mean_loss(model, x, y)

    model.limit = 2
    with pytest.raises(GradSyncError, match="changed the buffer 'table' of a Counting"):
        run(model, *batch(6), function=function, fit=fit)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_arguments_are_put_back(where):
    """A body may write to the lists and dicts that it is given; a tensor that it writes to is an error that says so."""

    def function(model, some, others, log):
        log.append(len(others["x"]))
        others["x"] = others["x"] * 2
        some[0] = others["output"] = model(others["x"])
        return ((others["output"] - others["y"]) ** 2).mean(dim=1).mean()

    truth, _ = reference(6, lambda model, x, y: mean_loss(model, 2 * x, y))
    x, y = batch(6)
    model = Net()
    model.limit, model.where = 1, where
    outputs, alive = [], []  # of parts: each is to be gone before the next part runs
    model.register_forward_hook(lambda _, __, output: outputs.append(weakref.ref(output)))
    model.register_forward_pre_hook(lambda *_: alive.extend(ref() for ref in outputs if ref() is not None))
    some, others, log = [y], {"x": x, "y": y}, []
    run(model, some, others, log, function=function)
    assert_same(gradients(model), truth)
    assert log == [1] * 6  # of the parts that fitted alone, though it began empty
    assert some[0] is y and list(others) == ["x", "y"] and others["x"] is x
    assert len(outputs) >= 6 and not alive

    def in_place(model, x, y):
        return mean_loss(model, x.mul_(2), y)

    with pytest.raises(GradSyncError, match=r"wrote to one of them in place, a tensor of shape \(6, 5\)"):
        run(model, x.clone(), y, function=in_place)
    model.limit = 6
    with torch.inference_mode():
        x = x.clone()  # has no version
    run(model, x, y, function=lambda model, x, y: mean_loss(model, x.clone(), y))


class Output(OrderedDict):
    """Like that of transformers' models: it may be read and written to, but not deleted from or updated."""

    def __delitem__(self, *_):
        raise NotImplementedError

    pop = update = clear = __delitem__


def test_mappings_are_put_back():
    """In their order, by which a size is remembered; and one that nobody has changed is left alone."""

    def function(model, batch, output):
        y = batch.pop("y")
        return mean_loss(model, batch["x"], y + 0 * output["logits"])

    model = Net()
    model.limit = 3
    fit = opened(model)
    x, y = batch(6)
    output = Output()
    output["logits"] = y
    for _ in range(3):
        outcome = run(model, some := {"y": y, "x": x}, output, function=function, fit=fit)
        assert outcome.parts == 2 and list(output) == ["logits"] and list(some) == ["y", "x"]
    assert model.log == [6]  # only the first call tried more


def test_returned_objects():
    """The same kinds of objects come back, with the loss of the whole in them."""
    _, (truth,) = reference(6, mean_loss)
    for returns in (lambda loss: {"loss": loss, "more": 1}, lambda loss: (loss, 1), lambda loss: [loss, 1]):
        values = []
        for limit in (6, 2):
            model = Net()
            model.limit = limit
            outcome = run(model, *batch(6), function=lambda *a, r=returns: r(mean_loss(*a)))
            found = outcome.returned["loss"] if isinstance(outcome.returned, dict) else outcome.returned[0]
            assert not found.requires_grad
            torch.testing.assert_close(found, truth)
            values.append(found)
        torch.testing.assert_close(*values)
    model = Net()
    model.limit = 4
    returned = run(model, *batch(6), function=lambda *a: {"loss": sum_loss(*a)}).returned["loss"]
    assert returned.count == 30


def test_own_cut():
    """A function of the user's cuts anything; means need rows that add up, sums need nothing."""

    class Graphs:
        def __init__(self, *data):
            self.data = data

    def cut(args, kwargs, parts):
        model, graphs = args
        rows = len(graphs.data[0])
        step = -(-rows // parts)
        return [
            ((model, Graphs(*(one[at : at + step] for one in graphs.data))), kwargs) for at in range(0, rows, step)
        ]

    truth, _ = reference(7, sum_loss)
    model = Net()
    model.limit = 2
    fit = opened(model, cut)
    function = lambda model, graphs: sum_loss(model, *graphs.data)  # noqa: E731
    for index in range(2):
        model.zero_grad()
        outcome = run(model, Graphs(*batch(7)), function=function, fit=fit)
        assert_same(gradients(model), truth)
        assert outcome.rows is None and outcome.parts == 4
    model.limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        run(model, Graphs(*batch(7)), function=function, fit=opened(model, cut))
    model.limit = 2
    with pytest.raises(GradSyncError, match="Return LossSum"):
        run(model, Graphs(*batch(7)), function=lambda m, g: mean_loss(m, *g.data), fit=opened(model, cut))
    for came in (None, 3, [batch(7)], [((model,), {}, 1)]):
        with pytest.raises(GradSyncError, match=r"a list of pairs \(args, kwargs\), each a tuple and a dict"):
            run(model, Graphs(*batch(7)), function=function, fit=opened(model, lambda *_, came=came: came))
    with pytest.raises(TypeError, match="fit must be True"):
        Fit(4)


def test_sizes_are_tried_larger_again(caplog):
    """After a while twice as much is tried: once if it fails, and kept if not; a line is logged as the size changes."""
    caplog.set_level(logging.INFO, "gradsync")
    model = Net(depth=2, at=1)
    model.limit = 2
    fit = opened(model)
    for _ in range(300):
        assert run(model, *batch(8), fit=fit).rows == 2
    assert model.log == [8, 4, 4, 4]  # after 64 calls, and 128 more
    assert [r.message for r in caplog.records] == [
        "train_step ran out of memory with 4 rows, and goes on with 2 rows"
    ]
    model.limit = 8
    sizes = [run(model, *batch(8), fit=fit).rows for _ in range(500)]
    assert sizes[-1] == 8 and sorted(sizes) == sizes and set(sizes) == {2, 4, 8}
    assert len(caplog.records) == 3
    assert run(model, *batch(3), fit=fit).parts == 1


def test_refused():
    """What a cut would spoil is an error that says so."""
    with pytest.raises(GradSyncError, match=r"bn is a BatchNorm1d in training"):
        opened(torch.nn.ModuleDict({"bn": torch.nn.BatchNorm1d(3)}))
    opened(torch.nn.BatchNorm1d(3).eval())
    with pytest.raises(GradSyncError, match="the model is a BatchNorm1d without running statistics"):
        opened(torch.nn.BatchNorm1d(3, track_running_stats=False).eval())
    model = Net()
    from torch.utils.checkpoint import checkpoint

    def reentrant(model, x, y):
        return mean_loss(lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True), x, y)

    with pytest.raises(GradSyncError, match="use_reentrant=False"):
        run(model, *batch(4), function=reentrant)

    def twice(model, x, y):
        first = checkpoint(model, x.requires_grad_(), use_reentrant=True)
        return mean_loss(lambda x: checkpoint(model, x, use_reentrant=True), Limit.apply(first, 2, "backward", []), y)

    fit = opened(model)
    run(model, *batch(2), fit=fit)  # whose graph is looked at, and is right
    with pytest.raises(GradSyncError, match="use_reentrant=False"):  # every parameter has got half of its gradient
        run(model, *batch(4), function=twice, fit=fit)
    model.limit = 2
    x, y = batch(4)

    def checkpointed(model, x, y):
        return mean_loss(lambda x: checkpoint(model, x, use_reentrant=False), x, y)

    truth, _ = reference(4, mean_loss)
    for where in ("forward", "backward"):
        model.where = where
        model.zero_grad()
        run(model, x, y, function=checkpointed)
        assert_same(gradients(model), truth)
    other = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    with pytest.raises(GradSyncError, match="belongs to none"):
        run(model, *batch(4), function=lambda *a: mean_loss(*a) * other)
    with pytest.raises(GradSyncError, match="argument 1 has 4 and argument 2 has 3"):
        run(model, x, y[:3])
    with pytest.raises(GradSyncError, match="there is none"):
        run_in_parts(mean_loss, (model,), {}, BackwardOf(model), opened(model))

    def mixed(model, x, y):
        return sum_loss(model, x, y) if x[0, 0] == x0 else mean_loss(model, x, y)

    x0 = x[0, 0].item()
    model.where = "forward"
    with pytest.raises(GradSyncError, match="same kind of loss"):
        run(model, x, y, function=mixed)


def test_models_sparse_and_tied():
    """Several models, a sparse embedding and a tied weight, failing where only some have got their gradients."""

    def make():
        torch.manual_seed(3)
        table = torch.nn.Embedding(9, 5, sparse=True, dtype=torch.float64)
        return torch.nn.ModuleList([table, Net(at=1)])

    def function(models, x, y):
        return mean_loss(models[1], models[0](x), y)

    x, y = torch.arange(6) % 4, batch(6)[1]
    results = []
    for limit in (6, 4, 1):
        models = make()
        models[1].limit, models[1].where = limit, "backward"
        for _ in range(2):
            run_in_parts(function, (models, x, y), {}, BackwardOf(models), opened(models))
        results.append([g.to_dense() for g in gradients(models)])
        assert models[0].weight.grad.is_sparse
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_a_boundary_that_lacks_memory_begins_once(monkeypatch):
    """What it has sent would come a second time, to ranks that wait for something else."""
    run, model, begun = functional.Run("example", functional.Terms(steps=1)), torch.nn.Linear(1, 1), []

    def begin(*_):
        begun.append(1)
        raise MemoryError

    monkeypatch.setattr(run, "begin", begin)
    place, in_parts = run.start(functional.Who([model])), functional.InParts(True, run.name)
    with run.holding(place), pytest.raises(GradSyncError, match="no memory left"):
        in_parts.run(run, place, lambda rows: model(rows).mean(), (torch.ones(4, 1),), {})
    assert begun == [1]
