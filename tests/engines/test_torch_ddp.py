"""What gradsync relies on in torch and torch does not promise. A failure here says: read the engine again.

The names stand in gradsync/engines/_torch_privates.py; behaviour is covered by the tests on real ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.autograd import Variable, profiler
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsync._state import SAID_OF_TORCH
from gradsync.engines._ddp_searched import _will_reach
from gradsync.engines._ddp_usable import joined
from gradsync.engines._torch_privates import PRIVATES, check_torch, missing


@pytest.fixture(scope="module")
def ddp():
    path = tempfile.mktemp()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))
    yield model
    dist.destroy_process_group()


def test_ddp_and_its_reducer_have_what_the_engine_uses(ddp):
    lost = missing(PRIVATES["ddp"], {"ddp": ddp})
    assert not lost, f"torch {torch.__version__} has no {lost}; see gradsync/engines/_ddp.py"
    assert list(inspect.signature(ddp._ddp_init_helper).parameters) == [
        "parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"]


@pytest.fixture
def forgetful():
    """A text is said once a process."""
    SAID_OF_TORCH.clear()
    yield
    SAID_OF_TORCH.clear()


@pytest.mark.parametrize(("version", "said"), [("2.9.1", ""), ("2.13.0+cpu", ""), ("2.15.3", ""), ("2.16.0a0+git", "tried with torch 2.9 to 2.15"), ("3.0.0", "this is torch 3.0.0")])
def test_a_torch_newer_than_what_was_tried_is_told_of_once(ddp, monkeypatch, forgetful, version, said):
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            check_torch("ddp", ddp=ddp)
    assert len(caught) == bool(said)
    assert not said or said in str(caught[0].message)


def test_a_torch_whose_privates_look_different_is_told_of(ddp, forgetful):
    """A name that is gone, and what others are looked up in."""

    class Changed:
        reducer = 1
        process_group = ddp.process_group

    with pytest.warns(RuntimeWarning, match=r"engine 'ddp' .* does not have ddp\._module_parameters.*ddp\.reducer\._rebuild_buckets"):
        changed = Changed()
        for name in PRIVATES["ddp"]["ddp"].split():
            if name != "_module_parameters" and not hasattr(changed, name):
                setattr(changed, name, None)
        check_torch("ddp", ddp=changed)
    assert missing({"a.b.c": "d"}, {"a": changed}) == ["a.b.c"]
    assert missing({"a": "gone|reducer here"}, {"a": changed}) == ["a.here"]


def test_ddp_reads_its_flag_where_the_engine_expects():
    source = inspect.getsource(DDP._post_forward)
    assert "require_backward_grad_sync" in source and "prepare_for_backward" in source
    assert "_static_graph_delay_allreduce_enqueued" in source
    assert "require_forward_param_sync" in inspect.getsource(DDP.will_sync_module_buffers)


def test_the_reducer_names_the_parameters_that_are_not_ready(ddp):
    """The engine reads them from the text of an error."""
    ddp.reducer.prepare_for_forward()
    ddp.reducer.prepare_for_backward([])
    ddp.module[1](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"did not receive grad for rank 0: 0 1\b"):
        ddp.reducer._check_reducer_finalized()
    joined(list(ddp.module[0].parameters())).backward()
    ddp.reducer._check_reducer_finalized()
    assert all(p.grad.abs().sum() == 0 for p in ddp.module[0].parameters())
    ddp.zero_grad()


def test_backward_stats_move_with_a_synchronisation_and_only_then(ddp):
    before = ddp.reducer.get_backward_stats()
    with ddp.no_sync():
        ddp(torch.ones(1, 2)).sum().backward()
    assert ddp.reducer.get_backward_stats() == before
    ddp(torch.ones(1, 2)).sum().backward()
    assert all(a != b for a, b in zip(ddp.reducer.get_backward_stats(), before, strict=True))
    ddp.zero_grad()


def test_logging_data_counts_parameters_and_names_the_hook(ddp):
    data = ddp._get_ddp_logging_data()
    assert data["num_parameter_tensors"] == 4 and "comm_hook" not in data
    hooked = DDP(torch.nn.Linear(1, 1))
    hooked._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert hooked._get_ddp_logging_data()["comm_hook"] == "BuiltinCommHookType.FP16_COMPRESS"
    assert hooked._comm_hooks == []


def test_groups_have_a_store_a_sequence_number_and_a_timeout(ddp):
    group = ddp.process_group
    assert group.get_group_store() is not None and group._get_sequence_number_for_group() >= 0
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() > 0


def test_callbacks_queued_in_a_callback_run_in_the_same_backward():
    """`join_running` queues itself twice, to come after the reducer's own end."""
    order = []
    queue = Variable._execution_engine.queue_callback
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda _: queue(lambda: (order.append(1), queue(lambda: order.append(3)))))
    weight.register_hook(lambda _: queue(lambda: order.append(2)))
    weight.sum().backward()
    assert order == [1, 2, 3]


def test_the_profiler_says_whether_it_runs():
    assert profiler._is_profiler_enabled is False
    with torch.profiler.profile(acc_events=True):
        assert profiler._is_profiler_enabled is True


def test_a_scaler_that_never_scaled_has_no_scale():
    assert torch.amp.GradScaler("cpu")._scale is None


KNOWN_IN_FORWARD = """
    AssertionError Join _DDPSink _cast_forward_inputs _check_global_requires_backward_grad_sync
    _check_sync_bufs_post_fwd _check_sync_bufs_pre_fwd _clear_grad_buffer _delay_all_reduce_all_params
    _divide_by_initial_world_size _find_tensors _has_rebuilt_buckets _inside_ddp_forward _join_config
    _lazy_init _lazy_init_ran _post_forward _pre_forward _rebuild_buckets _run_ddp_forward
    _set_forward_pass_work_handle _static_graph_delay_allreduce_enqueued _sync_buffers _to_kwargs
    _tree_flatten_with_rref _tree_unflatten_with_rref _use_python_reducer apply autograd compiler device
    device_ids device_type enable enumerate find_unused_parameters forward grad_fn info is_compiling
    is_grad_enabled is_tensor len list logger mixed_precision module notify_join_context param_dtype
    prepare_for_backward prepare_for_forward profiler range record_function reducer ref
    require_backward_grad_sync require_forward_param_sync set_runtime_stats_and_log static_graph torch
    use_side_stream_for_tensor_copies weakref
"""


def test_what_a_forward_of_ddp_does(ddp):
    """A DDP that is held and moves, casts or searches nothing goes without it: see `_shortcut` in engines/_ddp.py."""
    names = {name for part in ("forward", "_pre_forward", "_run_ddp_forward", "_post_forward")
             for name in getattr(DDP, part).__code__.co_names}  # fmt: skip
    known = set(KNOWN_IN_FORWARD.split())
    known -= {"AssertionError"} - names  # torch 2.9 asserts there, which names it nowhere
    assert names == known, f"torch {torch.__version__}: DDP's forward has changed by {names ^ known}; read it again"
    missing = [name for name in ("device_ids", "mixed_precision", "_join_config", "_compiled_call_impl") if not hasattr(ddp, name)]
    assert not missing, f"torch {torch.__version__}: DDP lost {missing}"
    assert "_in_backward_optimizers" in inspect.getsource(DDP._setup_in_backward_optimizers)


@pytest.mark.parametrize(
    ("ask", "reached"),
    [
        (lambda loss, inner, weight: loss.backward(), [False, False, True, True]),
        (lambda loss, inner, weight: torch.autograd.grad(loss, inner), [False] * 4),
        (lambda loss, inner, weight: torch.autograd.grad(loss, [weight]), []),
    ],
    ids=["backward", "grad", "grad of parameters"],
)
def test_a_backward_tells_which_parameters_it_will_reach(ask, reached):
    """Asked in a hook of the loss; `torch.autograd.grad` reaches none, or is not told of."""
    assert not missing(PRIVATES["find_unused"], {"C": torch._C})
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1) for _ in range(2)])
    inner = model[1](torch.ones(1, 2))
    loss, told = inner.sum(), []
    loss.grad_fn.register_prehook(lambda _: told.extend(_will_reach(joined(list(model.parameters())))))
    ask(loss, inner, model[1].weight)
    assert told == reached


@pytest.mark.parametrize("resets", [True, False])
def test_a_reducer_forgets_which_parameters_were_used_when_it_is_reset(ddp, resets):
    """It takes no undefined gradient for a parameter that any backward before has used."""
    model = torch.nn.Linear(2, 1)
    reducer = DDP(model, find_unused_parameters=True).reducer
    model.weight.sum().backward()
    model.zero_grad()
    if resets:
        reducer._reset_state()
    nothing = joined(list(model.parameters()))
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([nothing])
    with contextlib.nullcontext() if resets else pytest.raises(RuntimeError, match="gradient which is undefined"):
        nothing.backward()
    assert model.weight.grad is None
