"""`Engine`: what every engine can do."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsync._marks import REPLAYED, is_marked, mark

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel

    from gradsync._errors import GradSyncError
    from gradsync.ranks.tables import Tables


class Carrier(NamedTuple):
    """The DDP of an engine, whose communication hook sees each bucket of gradients."""

    ddp: DistributedDataParallel
    ledger: nn.Parameter | None = None  # its gradient has the flags, if gradsync has made the DDP
    flagged: Sequence[nn.Parameter] = ()


class Engine:
    """Keeps the gradients of some parameters equal across the ranks of a group.

    The calls of a window:

        trainable()                                 once, when it opens
        hold() ... forward, backward ... restore()  for each micro-batch: gradients stay local in between
        arm(loss), the backward, finish()           at the boundary, between its hold and its restore
        reduce()                                    instead of these, if the window closes without a backward
        misuse()                                    right before finish() or reduce(), if this rank ran micro-batches
        share_buffers(source)                       after either
        discard()                                   if the window is discarded

    Between micro-batches an engine is as the user left it: `hold` returns what it found, and `restore` puts that back.
    """

    #: Whether a forward or a held backward waits for the other ranks. Then all ranks must run equally many.
    forward_communicates = False
    #: Whether held gradients are not in `parameter.grad`, or are there in changing objects.
    holds_inside = False
    #: Whether a forward gives its leaves new storage. Do not keep their autograd nodes.
    swaps_storage = False
    #: The ranks over which the plain gradients of `in_pieces` lie in flat pieces.
    shard_group: ProcessGroup | None = None
    #: Groups of ranks that run a forward together, and so need the same data (tensor parallelism).
    twins: Sequence[ProcessGroup] = ()
    #: Whether torch's `Join` is around, which has its own way with ranks that run out.
    joins = False
    #: Whether the backward that runs weighs nothing: it uses no parameter. Set from outside.
    replays = False
    #: Whether it synchronises in the backward of a replay; else after it. If its forward communicates, it does.
    arms_replays = True
    _replayed: Sequence[torch.Tensor] = ()  # parameters that had no gradient before a replay
    #: Whether the next micro-batch must synchronise, even if it is held (the first of a static graph).
    owes_first = False
    #: Whether the engine's module is inside torch.compile.
    is_compiled = False
    #: Modules of the same class, below the engine's own, that it takes care of too.
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
        """The tensors at which gradients arrive, for hooks: other tensors than `parameters` if these are gathered."""
        return self.parameters

    @property
    def in_pieces(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients lie in pieces over `shard_group`, and are no DTensors."""
        return self.parameters if self.shard_group else ()

    @property
    def gathered(self) -> Mapping[torch.Tensor, nn.Parameter]:
        """The tensors that a forward has left in place of parameters, with these, until `ungather`."""
        return {}

    @property
    def emptied(self) -> Collection[nn.Module]:
        """The modules whose parameters are in others of the engine's for good, so that they have none of their own."""
        return ()

    @property
    def carrier(self) -> Carrier | None:
        """The DDP that its gradients travel in; None if there is none."""
        return None

    def num_held(self) -> int:
        """The number of parameters with a held gradient inside the engine."""
        return 0

    def held_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """The gradients that this rank holds, by parameter; not copies.

        They are whole; with a `sync` of "shard" or "each" they are pieces, with more dimensions.
        """
        return {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}

    def load_held(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Put held gradients into a window that has none yet."""
        for parameter in self.parameters:
            parameter.grad = gradients.get(parameter)

    def ungather(self) -> None:
        """Free what a forward has gathered, so that the module's parameters are those of its optimizer."""

    def trainable(self) -> bool:
        """Whether anything is trainable. Asked when a window opens."""
        return any(parameter.requires_grad for parameter in self.parameters)

    def is_wired(self) -> bool:
        """Whether its hooks are where the gradients of now arrive, asked as a window opens and before it closes."""
        return True

    def share_buffers(self, source: int) -> None:
        """Give all ranks the buffers of the group's rank `source`, when a window closes. Collective."""

    def send_buffers(self, source: int) -> Callable[[], None]:
        """The same in two steps: send the buffers now; call what is returned to wait until they are in place."""
        return lambda: self.share_buffers(source)

    def hold(self) -> Any:
        """Keep the gradients of the next backwards local; returns what `restore` needs."""
        raise NotImplementedError

    def hold_shards(self) -> Any:
        """Like `hold`, but an engine of two levels (HSDP) reduces within the ranks that share the shards."""
        return self.hold()

    def restore(self, found: Any) -> None:
        """Undo `hold`, and any `arm` since then."""
        raise NotImplementedError

    def before_frozen(self) -> Callable[[], object]:
        """Its parameters are frozen for a while: returns what puts back, afterwards, what it would lose of that."""
        return bool

    def arm(self, loss: torch.Tensor | None) -> None:
        """Make the next backward, that of `loss`, synchronise all that is accumulated.

        None means that a backward has begun already, from an unknown loss, and has reached no parameter yet.
        """
        raise NotImplementedError

    def note_visit(self) -> None:
        """The backward of `arm(None)` has reached a parameter of this engine."""

    @contextmanager
    def holding_armed(self) -> Iterator[None]:
        """A context for what runs after an armed backward has failed half-way: its gradients stay local."""
        found = self.hold()
        try:
            yield
        finally:
            self.restore(found)

    def finish(self) -> None:
        """The armed backward has ended: complete its collectives."""

    def abort(self) -> None:
        """The armed backward has failed: complete its collectives if possible, because the other ranks wait in them."""
        self.finish()

    def reduce(self) -> None:
        """Synchronise what is accumulated, without a backward. Other ranks may run an armed backward meanwhile."""
        raise NotImplementedError

    def reduce_together(self, tables: Tables) -> None:  # noqa: ARG002 - for engines whose ranks must tell each other
        """`reduce`, called by all ranks, which may tell each other over `tables` what they have."""
        self.reduce()

    def misuse(self) -> GradSyncError | None:
        """What is wrong with the parameters that this rank has used in the window, which is about to synchronise.

        It is raised after the collectives. None: nothing.
        """
        return None

    def unused(self) -> Iterator[nn.Parameter]:
        """The parameters that the window has not used so far, but in replays."""
        return (p for p in self.parameters if p.requires_grad and (p.grad is None or is_marked(p.grad, REPLAYED)))

    def note_replayed(self, parameter: torch.Tensor) -> None:
        """A replay has given zeros to a parameter that was unused. They stay until the window synchronises."""
        if parameter.grad is not None:
            mark([parameter], REPLAYED)
            self._replayed = (*self._replayed, parameter)

    def drop_replayed(self) -> None:
        """Drop the gradients of parameters that only replays have used in the window, which is about to synchronise."""
        replayed, self._replayed = self._replayed, ()
        for parameter in replayed:
            if parameter.grad is not None and is_marked(parameter.grad, REPLAYED):
                parameter.grad = None

    def discard(self) -> None:
        """Discard what is accumulated."""
        for parameter in self.parameters:
            parameter.grad = None


def trained_alike(leaf: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The leaf, frozen unless one of its parameters is trained: an engine would see to that in its next forward."""
    trained = any(parameter.requires_grad for parameter in parameters)
    if leaf.requires_grad != trained:
        leaf.requires_grad_(trained)
    return leaf
