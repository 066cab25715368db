"""Edits of a sharded model in the middle of a window.

There forwards and the engine itself keep parameters elsewhere than in their modules. That is no change. All else is one.
"""

from __future__ import annotations

import warnings
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)

import gradsync
from gradsync import GradSyncError, accumulating
from tests.changes.edits import HOWS
from tests.changes.rule import Net, NotExact, Outcome, Run, compare, layer, my_rank, sum_of_models
from tests.changes.together import hold
from tests.support.homes import clean, gathered, mesh
from tests.support.reference import micro_batch

STEPS = 3


class Sharded(NamedTuple):
    """A model on shards: the whole, what is inside of its wrapper, and its optimizer."""

    model: nn.Module
    net: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def body(self) -> nn.Sequential:
        return getattr(self.net.body, "module", self.net.body)

    def add(self, new: nn.Module) -> None:
        self.optimizer.add_param_group({"params": list(new.parameters())})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)


# -- engines --------------------------------------------------------------------------------------------------------


def fsdp2(reshards: bool) -> Sharded:
    model = fully_shard(Net(), reshard_after_forward=reshards)
    return Sharded(model, model, sgd(model))


def fsdp1(strategy: str, orig: bool, like: str = "") -> Sharded:
    """A root, and the two layers of its body in an instance of their own, or `like` something else."""
    options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": orig, "device_id": torch.device("cpu")}
    if "HYBRID" in strategy:
        options["device_mesh"] = mesh((2, 2), ("replicas", "shards"))
    net = Net()
    if like in LIKE:
        LIKE[like](net, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.body = FullyShardedDataParallel(net.body, **{**options, "ignored_states": None})
        model = net if like == "bare root" else FullyShardedDataParallel(net, **options)
    if like == "checkpointed from outside":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    return Sharded(model, net, sgd(model))


def _checkpointed(how: CheckpointImpl):
    def change(net: Net, _) -> None:
        net.body = checkpoint_wrapper(net.body, checkpoint_impl=how)

    return change


def _low(_, options: dict) -> None:
    options["mixed_precision"] = MixedPrecision(torch.float32, torch.float32)


def _offloaded(_, options: dict) -> None:
    options["cpu_offload"] = CPUOffload(offload_params=True)


def _tied(net: Net, _) -> None:
    net.body[2].weight = net.body[0].weight


def _frozen(net: Net, _) -> None:
    net.body.requires_grad_(False)


def _ignored(net: Net, options: dict) -> None:
    options["ignored_states"] = [net.head.weight]


LIKE = {
    "checkpointed": _checkpointed(CheckpointImpl.NO_REENTRANT),
    "checkpointed, reentrant": _checkpointed(CheckpointImpl.REENTRANT),
    "in float32": _low,
    "offloaded": _offloaded,
    "tied": _tied,
    "frozen": _frozen,
    "a parameter ignored": _ignored,
}

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
FSDP1 = [("fsdp1", strategy, orig) for strategy, orig in product(STRATEGIES, [False, True])]
# With FULL_SHARD, torch's own loop with `no_sync` has wrong gradients too; with NO_SHARD, gradients are seen to change.
NOT_OFFLOADED = [("fsdp1", "FULL_SHARD", True), ("fsdp1", "NO_SHARD", True)]
FSDP2 = [("fsdp2", True), ("fsdp2", False)]
HYBRIDS = [("fsdp1", strategy, orig) for strategy, orig in product(["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"], [False, True])]


def made(engine: tuple) -> Sharded:
    kind, *options = engine
    return {"fsdp1": fsdp1, "fsdp2": fsdp2}[kind](*options)


# -- edits ----------------------------------------------------------------------------------------------------------


def a_layer_more(s: Sharded) -> None:
    s.body.append(layer(5, 5))
    s.add(s.body[-1])


def a_layer_more_that_nobody_steps(s: Sharded) -> None:
    s.body.append(layer(5, 5))


def a_layer_replaced(s: Sharded) -> None:
    s.net.head = layer(5, 2)


def a_layer_replaced_and_stepped(s: Sharded) -> None:
    s.body[0] = layer(5, 5)
    s.add(s.body[0])


def a_layer_taken_out(s: Sharded) -> None:
    del s.body[2]


def two_layers_swapped(s: Sharded) -> None:
    body = s.body
    body[0], body[2] = body[2], body[0]


def the_body_taken_out(s: Sharded) -> None:
    s.net.body = nn.Identity()


def another_parameter_in_the_optimizer(s: Sharded) -> None:
    s.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3).double())]})


def another_optimizer(s: Sharded) -> None:
    s.optimizer.param_groups[0]["params"].pop()


def frozen(s: Sharded) -> None:
    s.net.body.requires_grad_(False)


EDITS = {edit.__name__: edit for edit in (
    a_layer_more, a_layer_more_that_nobody_steps, a_layer_replaced, a_layer_replaced_and_stepped, a_layer_taken_out,
    two_layers_swapped, the_body_taken_out, another_parameter_in_the_optimizer, another_optimizer,
    frozen)}  # fmt: skip

OF_OPTIMIZERS = ["another_parameter_in_the_optimizer", "another_optimizer"]  # which `sync_every` does not know


def a_bias_taken_out(s: Sharded) -> None:
    s.net.head.bias = None


def a_bias_replaced(s: Sharded) -> None:
    s.net.head.bias = nn.Parameter(torch.zeros_like(s.net.head.bias))


def assigned(s: Sharded) -> None:
    s.model.load_state_dict({k: v.clone() for k, v in s.model.state_dict().items()}, assign=True)


OF_A_PARAMETER = {edit.__name__: edit for edit in (a_bias_taken_out, a_bias_replaced, assigned)}


# -- what is no edit ------------------------------------------------------------------------------------------------


def nothing(s: Sharded) -> None:
    pass


def a_forward(s: Sharded) -> None:
    s.model(micro_batch(my_rank(), 0))


def a_forward_kept(s: Sharded) -> None:
    """Its graph, and so what it left in the modules, lives on."""
    s.model.__dict__["kept"] = s.model(micro_batch(my_rank(), 0))


def an_evaluation(s: Sharded) -> None:
    s.model.eval()
    with torch.no_grad():
        s.model(micro_batch(my_rank(), 0))
    s.model.train()


def a_state(s: Sharded) -> None:
    """All parameters are put back into their modules, whole, and taken out again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(s.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            s.model.state_dict()


def what_has_no_parameters(s: Sharded) -> None:
    """A tensor and an activation more."""
    s.net.seen = torch.ones(3)
    s.net.more = nn.Tanh()


NO_EDITS = {one.__name__: one for one in (nothing, a_forward, a_forward_kept, an_evaluation, a_state, what_has_no_parameters)}


# -- the stories ----------------------------------------------------------------------------------------------------


def in_windows(s: Sharded, how: str, at: int, edit, windows: int = 3) -> None:
    """Windows of three; `edit` comes before the micro-batch `at`."""
    step = accumulating(steps=STEPS)(lambda model, optimizer, x: sum_of_models(model, x))
    micro_steps = gradsync.sync_every(s.model, STEPS)
    try:
        for i in range(windows * STEPS):
            if i == at:
                edit(s)
            if how == "accumulating":
                step(s.model, s.optimizer, micro_batch(my_rank(), i))
                continue
            micro_step = next(micro_steps)
            micro_step.backward(sum_of_models(s.model, micro_batch(my_rank(), i)))
            if micro_step.last:
                s.optimizer.step()
                s.optimizer.zero_grad()
    finally:
        micro_steps.close()


def edited(engine: tuple, name: str, how: str, at: int) -> Outcome:
    """The error comes at the boundary of the window, micro-batches later."""
    s = made(engine)
    try:
        in_windows(s, how, at, {**EDITS, **OF_A_PARAMETER}[name], windows=2)
    except GradSyncError as error:
        return Outcome("error", str(error))
    return Outcome("off", "no error")


def not_edited(engine: tuple, name: str, how: str, at: int) -> Outcome:
    """No error, and the numbers of a run on one process."""
    s, reference = made(engine), Run("reference", "bare", STEPS)
    like = engine[-1] if engine[0] == "fsdp1" else ""
    if like in ("tied", "frozen"):
        LIKE[like](reference.model, {})
        reference.optimizer = sgd(reference.model)
    # torch pins what it offloads, and waits for a stream, as if there were a GPU.
    pins, waits = patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor), patch.object(
        torch.cpu.Stream, "synchronize", lambda _: None, create=True)  # fmt: skip
    with pins, waits:
        in_windows(s, how, at, NO_EDITS[name])
    reference.train(3)
    try:
        compare([full(s)], [{n.removeprefix("0."): p for n, p in reference.trace[-1].items()}],
                1e-4 if like == "in float32" else 1e-10)  # fmt: skip
    except NotExact as error:
        return Outcome("off", str(error))
    return Outcome("exact")


def full(s: Sharded) -> dict[str, torch.Tensor]:
    with gathered(s.model):
        named = {clean(name).replace("_checkpoint_wrapped_module.", ""): p for name, p in s.net.named_parameters()}
        return {name: getattr(p, "full_tensor", p.detach)().detach().clone() for name, p in named.items() if "_flat" not in name}


WAYS = HOWS[::2]
LATER = [4, 5]  # one held micro-batch before the change and one after it, or none


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_fsdp1_in_the_middle_of_a_window(ranks, name):
    """Whether its parameters are flat or not, whichever way they are sharded."""
    ways = WAYS[:1] if name in OF_OPTIMIZERS else WAYS
    hold(ranks, 2, edited, product(FSDP1, [name], ways, LATER), says="middle", only="error")


def test_a_parameter_of_fsdp1_edited_in_the_middle_of_a_window(ranks):
    """Just before the boundary; in a forward before that, torch itself fails or puts the parameter back."""
    hold(ranks, 2, edited, product(FSDP1, ["a_bias_replaced"], WAYS, [5]), says="middle", only="error")
    of_its_own = [engine for engine in FSDP1 if engine[-1]]
    hold(ranks, 2, edited, product(of_its_own, ["a_bias_taken_out"], WAYS, [5]), says="middle", only="error")


def test_an_edit_of_a_hybrid_in_the_middle_of_a_window(ranks):
    hold(ranks, 4, edited, product(HYBRIDS, EDITS, WAYS[:1], [4]), says="middle", only="error")


def test_an_edit_of_fsdp2_in_the_middle_of_a_window(ranks):
    hold(ranks, 2, edited, product(FSDP2, ["a_layer_more", "assigned"], WAYS, [4]), says="middle", only="error")


@pytest.mark.parametrize("like", ["", "bare root", "checkpointed from outside", *LIKE])
def test_what_fsdp1_does_with_its_parameters_is_no_edit(ranks, like):
    """Nothing is raised where nothing has changed, however the model is sharded and whatever runs beside."""
    engines = [(*engine, like) for engine in FSDP1 if like != "offloaded" or engine not in NOT_OFFLOADED]
    hold(ranks, 2, not_edited, product(engines, NO_EDITS, WAYS, [4]), only="exact")
    if like not in ("in float32", "offloaded"):  # there torch's own loop does not reduce after a forward beside it
        hold(ranks, 2, not_edited, product(engines, NO_EDITS, WAYS[:1], [3, 5]), only="exact")


def test_what_a_hybrid_and_fsdp2_do_with_their_parameters_is_no_edit(ranks):
    hold(ranks, 4, not_edited, product(HYBRIDS, NO_EDITS, WAYS[:1], [4]), only="exact")
    hold(ranks, 2, not_edited, product(FSDP2, ["nothing", "a_forward", "an_evaluation"], WAYS, [3, 4, 5]), only="exact")
