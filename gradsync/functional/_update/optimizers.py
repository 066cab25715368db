"""What optimizers step, and the optimizer inside others' wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def owned(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """The parameters of the optimizers, each once."""
    found = [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]
    return found if len(found) == 1 else list({id(parameter): parameter for parameter in found}.values())


def bare_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside that of Accelerate or Fabric; any other optimizer itself."""
    inner = optimizer.__dict__.get("optimizer", optimizer.__dict__.get("_optimizer"))
    return bare_optimizer(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer
