"""What people do to a model between two windows: each is a function of the run."""

from __future__ import annotations

import copy
import gc

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.changes.rule import Net, Run, layer

HOWS = ["accumulating", "accumulating anew", "sync_every", "sync_every anew"]
WRAPS = ["bare", "ddp"]


def backbone_and_head(run: Run) -> tuple[Net, Net]:
    one, two = run.model, Net(seed=9)
    run.models = [one, two]
    return one, two


def new_head(run: Run) -> None:
    run.model.head = layer(5, 3)
    run.optimizer.add_param_group({"params": list(run.model.head.parameters())})


def new_head_and_optimizer(run: Run) -> None:
    run.model.head = layer(5, 3)
    run.optimizer = run.sgd(run.model)


def new_head_that_nobody_steps(run: Run) -> None:
    run.model.head = layer(5, 3)


def appended_layer(run: Run) -> None:
    run.model.body.append(layer(5, 5))
    run.optimizer.add_param_group({"params": list(run.model.body[-1].parameters())})


def layer_taken_out(run: Run) -> None:
    del run.model.body[2]


def layers_of_another_kind(run: Run) -> None:
    """As many parameters as before, of the same shapes: other objects."""
    run.model.body = nn.Sequential(layer(5, 5, seed=1), nn.Tanh(), layer(5, 5, seed=2), nn.Tanh())
    run.optimizer = run.sgd(run.model)


class Adapted(nn.Module):
    """What peft puts in a layer's place."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.down, self.up = inner, layer(5, 2), layer(2, 5)

    @property
    def weight(self):
        return self.inner.weight

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def adapter(run: Run) -> None:
    run.model.requires_grad_(False)
    run.model.body[0] = Adapted(run.model.body[0])
    run.optimizer.add_param_group({"params": [p for p in run.model.parameters() if p.requires_grad]})


def adapter_and_optimizer(run: Run) -> None:
    run.model.requires_grad_(False)
    run.model.body[0] = Adapted(run.model.body[0])
    run.optimizer = run.sgd([p for p in run.model.parameters() if p.requires_grad])


def weight_norm(run: Run) -> None:
    parametrizations.weight_norm(run.model.body[0])
    run.optimizer = run.sgd(run.model)


def weight_norm_of_which_the_optimizer_knows_half(run: Run) -> None:
    parametrizations.weight_norm(run.model.body[0])


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def symmetric(run: Run) -> None:
    """The parameter stays, and gets another storage and another node in autograd's graph."""
    nn.utils.parametrize.register_parametrization(run.model.body[0], "weight", Symmetric())


def symmetric_and_back(run: Run) -> None:
    symmetric(run)
    run.train()
    nn.utils.parametrize.remove_parametrizations(run.model.body[0], "weight")


def in_float32_and_back(run: Run) -> None:
    """As before in all that a parameter tells of itself, but for its node in autograd's graph."""
    run.model.float()
    run.model.double()


def bias_taken_out(run: Run) -> None:
    """The last parameter of all, which the optimizer still has."""
    run.model.head.bias = None


def other_buffers(run: Run) -> None:
    run.model.register_buffer("extra", torch.ones(3))
    run.train()
    run.model.extra = torch.zeros(5).double()


def assigned(run: Run) -> None:
    run.model.load_state_dict({k: v.clone() for k, v in run.model.state_dict().items()}, assign=True)
    run.optimizer = run.sgd(run.model)


def assigned_behind_the_optimizer(run: Run) -> None:
    run.model.load_state_dict({k: v.clone() for k, v in run.model.state_dict().items()}, assign=True)


def other_storage(run: Run) -> None:
    """What `vector_to_parameters` and many meta-learners do."""
    for parameter in run.model.parameters():
        parameter.data = parameter.data.clone()


def other_layout(run: Run) -> None:
    """What `channels_last` does to a convolution."""
    weight = run.model.body[0].weight
    weight.data = weight.data.t().contiguous().t()


def taken_out_of_ddp(run: Run) -> None:
    run.unwrap()


def sub_module_alone(run: Run) -> None:
    """The backbone goes on under another head, the whole that it was part of is dropped."""
    other = Net(seed=3)
    other.body = run.model.body
    run.model, run.models = other, [other]
    run.optimizer = run.sgd(other)
    gc.collect()


def sub_module_alone_bare(run: Run) -> None:
    sub_module_alone(run)
    run.unwrap()


def in_float32(run: Run) -> None:
    run.model.float()


def in_float32_and_optimizer(run: Run) -> None:
    run.model.float()
    run.optimizer = run.sgd(run.model)


def resized_embedding(run: Run) -> None:
    old = run.model.emb.weight
    torch.manual_seed(5)
    run.model.emb = nn.Embedding(6, 5).double()
    with torch.no_grad():
        run.model.emb.weight[:4] = old
    run.optimizer = run.sgd(run.model)


def resized_in_place(run: Run) -> None:
    """What transformers do: the parameter stays, its shape is another."""
    torch.manual_seed(5)
    run.model.emb.weight.data = torch.cat([run.model.emb.weight.data, torch.randn(2, 5).double()])
    run.model.emb.num_embeddings = 6


def frozen(run: Run) -> None:
    run.model.body.requires_grad_(False)


def frozen_and_back(run: Run) -> None:
    frozen(run)
    run.train()
    run.model.body.requires_grad_(True)


def swapped(run: Run) -> None:
    """Two layers of one size: the same number of parameters and of elements as before."""
    run.model.body[0].requires_grad_(False)
    run.train(1)
    run.model.body[0].requires_grad_(True)
    run.model.body[2].requires_grad_(False)


def tied(run: Run) -> None:
    run.model.body[2].weight = run.model.body[0].weight


def tied_and_untied(run: Run) -> None:
    tied(run)
    run.train()
    run.model.body[2].weight = nn.Parameter(run.model.body[0].weight.detach().clone())
    run.optimizer = run.sgd(run.model)


def part_of_something_larger(run: Run) -> None:
    """The model that was trained alone is a layer of another now."""
    larger = nn.Sequential(run.model, layer(2, 2))
    run.models, run.optimizer = [larger], run.sgd(larger)


def only_a_part(run: Run) -> None:
    smaller = nn.Sequential(run.model.inp, run.model.body)
    run.models, run.optimizer = [smaller], run.sgd(smaller)


def copied(run: Run) -> None:
    run.model = copy.deepcopy(run.model)
    run.models, run.optimizer = [run.model], run.sgd(run.model)


def optimizer_of_a_part(run: Run) -> None:
    run.optimizer = run.sgd(run.model.head)


EDITS = [
    new_head, new_head_and_optimizer, new_head_that_nobody_steps, appended_layer, layer_taken_out, layers_of_another_kind,
    adapter, adapter_and_optimizer, weight_norm, weight_norm_of_which_the_optimizer_knows_half, symmetric,
    symmetric_and_back, in_float32_and_back, bias_taken_out, other_buffers, assigned, assigned_behind_the_optimizer,
    other_storage, other_layout, taken_out_of_ddp, sub_module_alone, sub_module_alone_bare, in_float32,
    in_float32_and_optimizer, resized_embedding, resized_in_place, frozen, frozen_and_back, swapped, tied, tied_and_untied,
    part_of_something_larger, only_a_part, copied, optimizer_of_a_part,
]  # fmt: skip
BY_NAME = {edit.__name__: edit for edit in EDITS}
ROUGH = {"in_float32", "in_float32_and_optimizer"}


def tolerance(name: str) -> float:
    return 1e-5 if name in ROUGH else 1e-10
