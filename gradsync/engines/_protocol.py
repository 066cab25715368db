"""What every engine can do, and nothing about how."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel


class Carrier(NamedTuple):
    """What an engine's gradients travel in: a DDP, whose communication hook sees each bucket."""

    ddp: DistributedDataParallel
    ledger: nn.Parameter | None = None  # whose gradient are flags, where gradsync has made the DDP
    flagged: Sequence[nn.Parameter] = ()


class Engine:
    """What keeps the gradients of some parameters in step across the ranks of one group.

    The life of a window, as an engine sees it:

        trainable()                                 once, as it opens
        hold() ... forward, backward ... restore()  for each micro-batch; what runs in between stays local
        arm(loss), the backward, settle()           on the boundary, between its hold and its restore
        reduce()                                    instead, where the window closes without a backward
        share_buffers(source)                       after either of these
        discard()                                   instead, where it is given up

    Between two calls an engine is as its user left it: `hold` returns what it found, and `restore` puts that back.
    """

    #: Whether a forward or held backward waits for the other ranks, so that all must run equally many.
    forward_communicates = False
    #: Whether held gradients are kept out of `parameter.grad`, or change their objects there as they like.
    holds_inside = False
    #: Whether other storage comes behind its leaves in a forward, so that nobody may hold their nodes in the graph.
    swaps_storage = False
    #: The ranks that each plain gradient is spread over in flat pieces; None where it is whole, or a DTensor.
    shard_group: ProcessGroup | None = None
    #: Groups of ranks that run one forward together, and so need the same data (tensor parallel).
    twins: Sequence[ProcessGroup] = ()
    #: Whether torch.compile goes through the module that it was made for.
    is_compiled = False
    #: The modules of this class that the engine looks after as well, below the one it was made for.
    modules: Sequence[nn.Module] = ()

    def __init__(self, group: ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
        self._group = group
        self.parameters: Sequence[nn.Parameter] = parameters

    @property
    def group(self) -> ProcessGroup:
        """The ranks whose gradients are averaged."""
        return self._group

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """Where gradients arrive in a backward, for hooks; other tensors than `parameters` where these are gathered."""
        return self.parameters

    @property
    def gathered(self) -> Mapping[torch.Tensor, nn.Parameter]:
        """The tensors that a forward has left in the place of parameters, and of which; `rest` puts them away."""
        return {}

    @property
    def carrier(self) -> Carrier | None:
        """What its gradients travel in; None where that is not a DDP of the user's, or of gradsync's."""
        return None

    def num_held(self) -> int:
        """How many parameters have a gradient that is not synchronised, where the engine keeps those itself."""
        return 0

    def held_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """What this rank holds, by parameter; not a copy.

        Gradients are whole, or, where a `sync` of "shard" or "each" has reduced them, pieces: with dimensions more.
        """
        return {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}

    def load_held(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Hold these, in a window that holds nothing yet."""
        for parameter in self.parameters:
            parameter.grad = gradients.get(parameter)

    def rest(self) -> None:
        """Put away what a forward has gathered, so that the module's parameters are its optimizer's."""

    @property
    def owes_first(self) -> bool:
        """Whether the next micro-batch must synchronise, boundary or not (a static graph's very first)."""
        return False

    def trainable(self) -> bool:
        """Whether anything is trainable, asked as a window opens."""
        return any(parameter.requires_grad for parameter in self.parameters)

    def is_wired(self) -> bool:
        """Whether its hooks are where the gradients of now arrive, asked as a window opens and before it closes."""
        return True

    def share_buffers(self, source: int) -> None:
        """A window closes: make the buffers those of the group's rank `source`. Collective."""

    def send_buffers(self, source: int) -> Callable[[], None]:
        """The same in two: they are on their way now, and in place when what is returned has been called."""
        return lambda: self.share_buffers(source)

    def hold(self) -> Any:
        """Keep the gradients of coming backwards local; returns what was found, for `restore`."""
        raise NotImplementedError

    def hold_shards(self) -> Any:
        """`hold`, but reduce what needs no rank beyond those that share the shards, where an engine has two levels."""
        return self.hold()

    def restore(self, found: Any) -> None:
        """Undo `hold`, and an `arm` since then."""
        raise NotImplementedError

    def arm(self, loss: torch.Tensor | None) -> None:
        """Make the backward of `loss`, which comes next, synchronise all that is accumulated.

        None says that a backward has begun already, from a loss that is not known, and has reached no parameter yet.
        """
        raise NotImplementedError

    def note_visit(self) -> None:
        """The backward that `arm(None)` spoke of has reached a parameter of this engine."""

    @contextmanager
    def holding_armed(self) -> Iterator[None]:
        """What more is run of a micro-batch whose armed backward has stopped half-way stays local."""
        found = self.hold()
        try:
            yield
        finally:
            self.restore(found)

    def settle(self) -> None:
        """The armed backward has ended: complete its collectives."""

    def abort(self) -> None:
        """The armed backward has failed: complete its collectives, for which other ranks wait, if that can be done."""
        self.settle()

    def reduce(self) -> None:
        """Synchronise what is accumulated, without a backward; the other ranks may be in a backward of theirs."""
        raise NotImplementedError

    def discard(self) -> None:
        """Drop what is accumulated."""
        for parameter in self.parameters:
            parameter.grad = None
