"""What the sharded engines touch of torch's privates is there, and does what it did in torch 2.13.

Torch alone, without gradsync. A failure here says what to read again before anything else is looked at.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gradsync.engines import _torch
from gradsync.engines._torch_privates import MADE_LATER, PRIVATES, missing
from tests.support.homes import home_of
from tests.support.models import Partly
from tests.support.reference import mean_of
from tests.support.training import data


def have(kind: str, **roots: object) -> None:
    """What torch makes at once and what it makes later: both are there after a backward."""
    lost = missing(PRIVATES[kind], roots) + missing(MADE_LATER.get(kind, {}), roots)
    assert not lost, f"torch {torch.__version__} has no {lost}; see gradsync/engines/_{kind}.py"


def fsdp2_names() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    assert hasattr(TrainingState, "IDLE")
    home = home_of("fsdp2")
    home.model(data(0, 0)).sum().backward()
    state = home.model.first._get_fsdp_state()
    (group,) = _torch.groups_of(state)
    have("fsdp2", state=state, group=group, param=group.fsdp_params[0])
    for name in ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "_partial_reduce_output"):
        assert name in group.__dict__, f"{name} is not a plain attribute of a parameter group any more"


def fsdp1_names() -> None:
    from torch.distributed.fsdp import _runtime_utils

    home = home_of("fsdp1_full")
    home.model(data(0, 0)).sum().backward()
    for name in ("_sync_gradients", "training_state", "_is_root"):
        assert name in home.model.__dict__, f"{name} is not a plain attribute of FullyShardedDataParallel any more"
    handle = home.model._handle
    have("fsdp1", module=home.model, handle=handle, runtime=_runtime_utils)
    assert all(hasattr(handle.flat_param._shard_param_infos[0], n) for n in ("in_shard", "offset_in_shard", "numel_in_shard"))
    assert all(hasattr(handle.flat_param._param_infos[0], name) for name in ("module", "param_name"))


def replicate_names() -> None:
    from torch.distributed._composable.replicate import replicate

    home = home_of("replicate")
    state = replicate.state(home.model)
    assert state._init_args, "replicate makes its DDP before the first forward now"
    state.lazy_init()
    have("replicate", state=state)
    assert not state._init_args


@pytest.mark.parametrize("case", [fsdp2_names, fsdp1_names, replicate_names])
def test_the_names_are_there(ranks, case):
    """Each attribute that the first lines of an engine's file name."""
    ranks(2).run(case)


def fsdp2_keeps_held_gradients_through_zero_grad_and_our_reset() -> None:
    home = home_of("fsdp2")
    home.model.set_requires_gradient_sync(False)
    home.model(data(0, 0)).sum().backward()
    home.model.zero_grad()
    (group,) = _torch.groups_of(home.model.first._get_fsdp_state())
    assert all(p.sharded_param.grad is None and p._unsharded_param.grad is not None for p in group.fsdp_params)
    held = [p._unsharded_param.grad for p in group.fsdp_params]
    _torch.reset_iteration(home.model._get_fsdp_state())
    assert all(p._unsharded_param.grad is gradient for p, gradient in zip(group.fsdp_params, held, strict=True))


def fsdp2_reads_its_switch_as_a_backward_ends() -> None:
    home = home_of("fsdp2")
    home.model.set_requires_gradient_sync(False)
    loss = home.model(data(0, 0)).sum()
    home.model.set_requires_gradient_sync(True)
    loss.backward()
    assert all(p.grad is not None for p in home.model.parameters())


def fsdp2_fails_without_us_where_a_module_never_ran() -> None:
    """Where no supported torch fails here, `FSDP2Engine.hold` need not make unsharded parameters in advance."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    model = Partly()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in (model.one, model.two, model):
        fully_shard(layer, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    fails = "to_accumulated_grad_if_needed" in vars(FSDPParam)  # before torch 2.15
    with pytest.raises(AttributeError, match="_unsharded_param") if fails else nullcontext():
        model(torch.ones(2, 4)).float().sum().backward()


def fsdp2_skips_the_rest_of_a_partial_reduction() -> None:
    """Why `reduce` needs reduce_scatter_unused_params there, before torch 2.15."""
    home = home_of("hsdp_shard")
    home.model.set_requires_all_reduce(False)
    mean_of(home.model(data(home.rank, 0))).backward()
    home.model.set_requires_all_reduce(True)
    _torch.begin_backward(home.model._get_fsdp_state())
    home.model._get_fsdp_state()._root_post_backward_final_callback()
    remembers = hasattr(_torch.groups_of(home.model._get_fsdp_state())[0], "_partial_reduce_output_layout")
    assert all((p.grad is None) != remembers for p in home.model.parameters())


def fsdp2_keeps_a_partial_reduction_in_the_order_of_its_parameters() -> None:
    """Each with its padding, the unused ones too; `held_gradients` takes it apart."""
    home = home_of("hsdp_shard", unused=True)
    home.model.set_requires_all_reduce(False)
    for block in (home.model.first, home.model.second):
        (group,) = _torch.groups_of(block._get_fsdp_state())
        group.reduce_scatter_unused_params = True
    mean_of(home.model(data(home.rank, 0))).backward()
    output, start = group._partial_reduce_output, 0
    params = dict(home.model.second.named_parameters())
    names = [next(name for name, p in params.items() if p is param.sharded_param) for param in group.fsdp_params]
    assert set(names) == params.keys(), names
    for name, param in zip(names, group.fsdp_params):
        used = output[start : start + param._sharded_param_data.numel()].any()
        assert used == (name != "unused"), name
        start += param._sharded_param_data.numel()
    assert start == output.numel()
    assert _torch.partial_layout(group) == _torch.new_layout(group)


def fsdp1_holds_a_whole_flat_gradient_and_reduces_it_to_its_shard() -> None:
    """Its size tells which it is. `load_held` gives the original parameters gradients, because torch looks at those."""
    home = home_of("fsdp1_full_orig")
    flat = home.model._handle.flat_param
    with home.model.no_sync():
        mean_of(home.model(data(home.rank, 0))).backward()
        assert flat.grad.shape == flat._unpadded_unsharded_size != flat.shape
        assert all(p.grad is not None for p in home.model.parameters())
        for p in home.model.parameters():
            p.grad = None
        home.model(data(home.rank, 0))
        assert flat.grad is None
    home = home_of("fsdp1_full_orig")
    flat = home.model._handle.flat_param
    mean_of(home.model(data(home.rank, 0))).backward()
    assert flat.grad.shape == flat.shape and not hasattr(flat, "_saved_grad_shard")


def fsdp1_reads_its_switch_as_a_backward_ends() -> None:
    home = home_of("fsdp1_full")
    with home.model.no_sync():
        loss = home.model(data(0, 0)).sum()
    loss.backward()
    assert all(p.grad.shape == p.shape for p in home.model.parameters())


def fsdp1_leaves_views_in_place_of_parameters() -> None:
    """Of flat parameters for good; else until the backward has run. Each is an attribute of its module, by its name."""

    def layer_of(engine: str) -> tuple:
        home = home_of(engine)
        block = home.net.first
        up = block.module.up
        infos = [info for info in block._handle.flat_param._param_infos if info.module is up]
        assert [info.param_name for info in infos] == ["weight", "bias"]
        return home, up

    home, up = layer_of("fsdp1_full")
    for _ in range(2):
        assert not up._parameters and all(isinstance(vars(up)[name], torch.Tensor) for name in ("weight", "bias"))
        home.model(data(0, 0)).sum().backward()
    home, up = layer_of("fsdp1_grad_op_orig")
    own = dict(up._parameters)
    loss = home.model(data(0, 0)).sum()
    assert all(up._parameters[name] is vars(up)[name] is not own[name] for name in own)
    loss.backward()
    assert all(up._parameters[name] is own[name] and name not in vars(up) for name in own)


def fsdp1_leaves_parameters_out_where_nothing_is_sharded() -> None:
    """After a backward of its input alone: they are not even in `_parameters`. The next forward takes views for them."""
    home = home_of("fsdp1_no_shard_orig")
    up = home.net.first.module.up
    own = up.weight
    x = data(0, 0).requires_grad_()
    torch.autograd.grad(home.model(x).sum(), x)
    assert "weight" not in up._parameters and isinstance(vars(up)["weight"], torch.Tensor)
    home.model(x)
    assert up.weight is not own


def replicate_reads_its_switch_in_forward() -> None:
    home = home_of("replicate")
    home.model.set_requires_gradient_sync(False)
    loss = mean_of(home.model(data(home.rank, 0)))
    home.model.set_requires_gradient_sync(True)
    loss.backward()
    gradient = home.model.scale.grad.clone()
    torch.distributed.all_reduce(gradient)
    assert not torch.equal(gradient / home.size, home.model.scale.grad)
    assert isinstance(home.model, nn.Module)


@pytest.mark.parametrize(
    "case",
    [
        fsdp2_keeps_held_gradients_through_zero_grad_and_our_reset,
        fsdp2_reads_its_switch_as_a_backward_ends,
        fsdp2_fails_without_us_where_a_module_never_ran,
        fsdp2_skips_the_rest_of_a_partial_reduction,
        fsdp2_keeps_a_partial_reduction_in_the_order_of_its_parameters,
        fsdp1_holds_a_whole_flat_gradient_and_reduces_it_to_its_shard,
        fsdp1_reads_its_switch_as_a_backward_ends,
        fsdp1_leaves_views_in_place_of_parameters,
        fsdp1_leaves_parameters_out_where_nothing_is_sharded,
        replicate_reads_its_switch_in_forward,
    ],
)
def test_torch_does_what_it_did(ranks, case):
    """The behaviour that the engines are built on, or around."""
    ranks(4 if "partial" in case.__name__ else 2).run(case)
