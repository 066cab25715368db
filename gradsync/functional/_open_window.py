"""A window in the making, on its engines: what the decorator and the iterator both drive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync._errors import GradSyncError
from gradsync.functional._gradients import discard
from gradsync.functional._leaf_hooks import weightless
from gradsync.functional._loss import LossSum, check_loss
from gradsync.functional._lost import is_lost
from gradsync.functional._micro_batch import Hold, Joined, backward, exchange, reduce
from gradsync.functional._tally import Row, agree_on_sizes, check_twins, decode, encode, factor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from torch.amp import GradScaler

    from gradsync.engines import Engine, Table
    from gradsync.functional._bystanders import Bystanders
    from gradsync.functional._notice import Notice


class OpenWindow:
    """The micro-batches since the last boundary: how many came, what they were sums over, whose gradients they are.

    It holds no optimizer, and nothing in it outlives a boundary but the engines.
    """

    __slots__ = (
        "_active",
        "_seeds",
        "_tell_after",
        "_trainable",
        "count",
        "engines",
        "forward_communicates",
        "group",
        "hold",
        "in_step",
        "losses",
        "num_micro_batches",
        "num_ranks",
        "parameters",
        "rank",
        "size",
        "spread",
        "tells_size",
        "twins",
        "void",
        "watchable",
    )  # fmt: skip

    def __init__(
        self,
        engines: Sequence[Engine],
        parameters: Sequence[nn.Parameter],
        bystanders: Bystanders | None = None,
        *,
        shards: bool = False,
        tell_after: bool = False,
        tell_size: bool = False,
    ) -> None:
        self.engines = engines
        self.parameters = parameters
        self.void = False  # whether a backward failed in it
        self.tells_size = tell_size  # with each synchronisation, because the planned size may differ between ranks
        self._tell_after = tell_after  # not along with the gradients: a backward that fails must be told of too
        self.group = engines[0].group if engines else None
        self.num_ranks = self.group.size() if self.group else 1
        self.rank = self.group.rank() if self.group else 0
        if len({engine.group.size() for engine in engines}) > 1:
            raise GradSyncError(
                "All engines of one step must synchronise over the same number of ranks, but they have "
                f"{[engine.group.size() for engine in engines]}. Give models on other groups a step function of their "
                "own."
            )
        self.twins = [group for engine in engines for group in engine.twins]
        self.hold = Hold([*engines, bystanders] if bystanders else engines, shards=shards)
        self.forward_communicates = any(engine.forward_communicates for engine in engines) or (
            bystanders is not None and bystanders.forward_communicates
        )
        self.in_step = self.forward_communicates and self.num_ranks > 1  # ranks take each micro-batch together
        if not self.forward_communicates:  # the largest first, which is the one to synchronise while backward runs
            self.engines = sorted(engines, key=lambda engine: -sum(p.numel() for p in engine.parameters))
        # Plain gradients that are spread over ranks, by their parameters' ids: norms are over all of their pieces.
        pieces = [engine for engine in engines if engine.shard_group]
        self.spread = {id(p): engine.shard_group for engine in pieces for p in engine.parameters if engine.shard_group}
        inside = {id(p) for engine in engines if engine.holds_inside for p in engine.parameters}
        self.watchable = [parameter for parameter in parameters if id(parameter) not in inside]
        self._seeds: dict[tuple[int, torch.dtype, torch.device, torch.Size], torch.Tensor] = {}
        self.size = 0
        self.num_micro_batches = 0
        self.count: float | torch.Tensor | None = None
        self.losses: list[torch.Tensor] = []

    def open(self, size: int) -> None:
        """Begin a window of `size` micro-batches."""
        self.size = size
        self._active = [engine for engine in self.engines if engine.trainable()]
        self._trainable = [parameter for parameter in self.parameters if parameter.requires_grad]
        self._clear()

    def backward(
        self,
        loss: torch.Tensor | LossSum,
        *,
        last: bool,
        notice: Notice | None = None,
        more: bool = False,
        filled: bool = False,
        early: bool = False,
        scaler: GradScaler | None = None,
    ) -> list[Row] | None:
        """One micro-batch's backward, inside `hold`; on the `last`, or `early` on each, the gradients synchronise.

        Returns what all ranks brought, where that is not known already: for sums, whose counts only their ranks know,
        and where there is a `notice`, by which this rank gives word before it brings anything but what is planned.
        """
        tensor = self._count(loss)
        if last:
            self._check_trainable()
        if scaler is not None:
            tensor = scaler.scale(tensor)
        seed = None if self.count is not None else self._seed(tensor)
        row = self._row(more=more, filled=filled) if last else None
        table = () if row is None else self._riding(row, notice)
        try:
            summed = backward(
                tensor,
                self._active,
                seed=seed,
                size=self.size,
                last=last,
                early=early,
                table=table,
            )
        except BaseException as error:
            if row is not None and notice is not None and not is_lost(error) and self._passed(notice):
                self.tell(row)  # the others wait for it
            raise
        return None if row is None else self._told(summed, row, notice)

    def replay(
        self,
        loss: torch.Tensor | LossSum,
        *,
        last: bool,
        notice: Notice | None = None,
        filled: bool,
        called: bool,
        early: bool = False,
    ) -> list[Row] | None:
        """The backward of a micro-batch that weighs nothing, for engines whose other ranks wait for it.

        Its gradients are replaced by zeros as they arrive: exact where `loss * 0` is not, with a NaN in it.
        """
        tensor = loss.loss if isinstance(loss, LossSum) else loss
        check_loss(tensor)
        row = self._row(more=False, filled=filled, called=called)
        zeros = weightless(self.leaves)
        try:
            table = self._riding(row, notice) if last else ()
            summed = backward(tensor, self._active, size=self.size, last=last, early=early, table=table)
        finally:
            zeros.remove()
        return self._told(summed, row, notice) if last else None

    def tell(self, row: Row) -> list[Row]:
        """What all ranks say, on its own and not along with gradients."""
        return [row] if self.num_ranks == 1 else decode(exchange(self.engines, self._table(row)))

    def step_together(self, *, more: bool, called: bool = True) -> list[Row]:
        """What all ranks say before a micro-batch whose forward communicates: whether they run one, and have more.

        Those that run one forward together, as in tensor parallelism, must say the same; else it is an error on every
        rank, for each of them has a place in the group of some other.
        """
        said, differ = (float(more), float(called)), False
        for group in self.twins:
            summed = torch.tensor(said, device=self.parameters[0].device)
            dist.all_reduce(summed, group=group)
            differ |= any(number not in {0, group.size()} for number in summed.tolist())
        rows = self.tell(Row(0, None, more=more, called=called, void=differ))
        check_twins([row.void for row in rows])
        return rows

    def spoil(self, *, last: bool, more: bool, filled: bool) -> list[Row] | None:
        """A backward has failed: all ranks must drop this window, which they learn as it closes."""
        self.void = True
        self.drop_gradients()
        return self.tell(self._row(more=more, filled=filled)) if last else None

    def gradients_left(self) -> tuple[int, int]:
        """How many parameters have a gradient, and how many one that their engine holds elsewhere."""
        inside = sum(engine.num_held() for engine in self.engines if engine.holds_inside)
        return sum(parameter.grad is not None for parameter in self.parameters), inside

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Where gradients arrive, for hooks: the parameters, or what their engine has gathered of them."""
        covered = {id(p) for engine in self.engines for p in engine.parameters}
        bare = [p for p in self.parameters if id(p) not in covered]
        return [*bare, *(leaf for engine in self.engines for leaf in engine.leaves)]

    @property
    def owes_first(self) -> bool:
        """Whether the next micro-batch synchronises, boundary or not."""
        return any(engine.owes_first for engine in self._active)

    def join_running(
        self,
        *,
        last: bool,
        weighs: bool,
        notice: Notice | None = None,
        more: bool,
        done: Callable[[list[Row] | None], None],
    ) -> Callable[[], bool]:
        """A backward that is not ours has begun: synchronise in it, and call `done` at its end.

        To be called when it is over, however it ended: what is returned, which completes the collectives if it has
        failed, and says whether it did so in waiting for other ranks.
        """
        self._check_trainable()
        self.num_micro_batches += weighs
        row = self._row(more=more)
        joined = Joined(
            self._active,
            size=self.size,
            last=last,
            table=self._riding(row, notice) if last else (),
            done=lambda summed: done(self._told(summed, row, notice) if last else None),
        )

        def over() -> bool:
            if joined.ended or joined.waits:
                return not joined.ended
            joined.abort()
            if last and notice is not None and self._passed(notice):
                self.tell(row)  # the others wait for it
            return False

        return over

    def reduce(
        self, *, notice: Notice | None = None, more: bool = False, filled: bool = False, called: bool = True
    ) -> list[Row] | None:
        """Synchronise what is held, without a backward, with whatever the other ranks do on this window."""
        row = self._row(more=more, filled=filled, called=called)
        return self._told(reduce(self._active, self._riding(row, notice)), row, notice)

    def agree_on_size(self, size: int) -> None:
        """Raise on every rank if the coming window is not planned to have this `size` on all. Collective.

        For engines whose forward communicates: on others `factor` finds it soon enough.
        """
        if self.num_ranks > 1:
            sizes = exchange(self.engines, [float(size) * (rank == self.rank) for rank in range(self.num_ranks)])
            agree_on_sizes(list(map(int, sizes)))

    def share_buffers(self, source: int) -> None:
        """Make the buffers of all ranks those of rank `source`. Collective where there are any."""
        for engine in self._active:
            engine.open(source)

    def factor(self, rows: Sequence[Row] | None) -> float | None:
        """What makes the synchronised gradients the mean; None if there is nothing to average."""
        return 1.0 if rows is None else factor(rows, self.size)

    def discard(self) -> None:
        """Drop what is accumulated, inside the engines too, and begin to count anew."""
        self.drop_gradients()
        self._clear()

    def drop_gradients(self) -> None:
        """Drop what is accumulated, inside the engines too."""
        for engine in self.engines:
            engine.discard()
        discard(self.parameters)

    def copy_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """What is held, for `put_back`: after a synchronisation that has turned out not to close the window."""
        return {p: p.grad.clone() for p in self.parameters if p.grad is not None}

    def put_back(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Each rank holds its own again, to save, to go on from, or to lose without any other's share."""
        for parameter in self.parameters:
            parameter.grad = gradients.get(parameter)

    def state_dict(self, names: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """What came so far on this rank: counts, losses, and the held gradients by the parameters' `names`."""
        held = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
        for engine in self.engines:
            held |= engine.held_gradients()
        return {
            "size": self.size,
            "num_micro_batches": self.num_micro_batches,
            # As it is: a float and an integer tensor would add up to a float32, which counts to 2**24 only.
            "count": self.count.detach().clone() if isinstance(self.count, torch.Tensor) else self.count,
            "losses": [loss.clone() for loss in self.losses],
            "gradients": {name: held[p].detach().clone() for name, p in names.items() if p in held},
        }

    def load_state_dict(self, state: Mapping[str, Any], names: Mapping[str, nn.Parameter]) -> None:
        """Put that back into a window that has just been opened, of the same parameters."""
        device, count = self.parameters[0].device, state["count"]
        self.num_micro_batches = state["num_micro_batches"]
        self.count = count.to(device) if isinstance(count, torch.Tensor) else count
        self.losses = [loss.to(device) for loss in state["losses"]]
        held = {names[name]: gradient.to(device).clone() for name, gradient in state["gradients"].items()}
        for engine in self.engines:
            engine.load_held(held)
        covered = {id(parameter) for engine in self.engines for parameter in engine.parameters}
        for parameter, gradient in held.items():
            if id(parameter) not in covered:
                parameter.grad = gradient

    def _clear(self) -> None:
        self.num_micro_batches = 0
        self.count = None
        self.losses = []
        self.void = False

    def _count(self, loss: torch.Tensor | LossSum) -> torch.Tensor:
        """Count a micro-batch; returns what to run backward from."""
        tensor, count = (loss.loss, loss.count) if isinstance(loss, LossSum) else (loss, None)
        is_sum = count is not None
        check_loss(tensor)
        if self.num_micro_batches and is_sum != (self.count is not None):
            raise GradSyncError(
                "All losses of a window must be of one kind, but a LossSum and a mean came. Return a LossSum in each "
                "micro-batch, or in none."
            )
        if count is not None:
            _check_count(count)
            self.count = count if self.count is None else self.count + count
        self.num_micro_batches += 1
        self.losses.append(tensor.detach().clone())  # a copy, because the caller may write to the one it gets back
        return tensor

    def _seed(self, loss: torch.Tensor) -> torch.Tensor:
        """The gradient that backward begins with: to the bit what `loss / size` would send on, without the division."""
        key = (self.size, loss.dtype, loss.device, loss.shape)
        seed = self._seeds.get(key)
        if seed is None:
            if len(self._seeds) > 16:  # a user's steps may take any number of values
                self._seeds.clear()
            seed = self._seeds[key] = torch.ones_like(loss, requires_grad=False) / self.size
        return seed

    def _riding(self, row: Row, notice: Notice | None) -> Table:
        """The table to send along with the gradients, if one is: which all ranks must answer alike."""
        if self.num_ranks == 1 or self._tell_after:
            return ()
        if notice is None:
            return self._table(row) if row.count is not None or self.tells_size else ()
        notice.announce(row, self.size)
        return self._table(row) if notice.rides else ()

    def _told(self, summed: Table, row: Row, notice: Notice | None) -> list[Row] | None:
        """What all ranks brought to a synchronisation that has ended; None if each brought a full window."""
        if self.num_ranks == 1:
            return [row]
        if self._tell_after or (notice is not None and self._passed(notice)):
            return self.tell(row)
        if summed:
            return decode(summed)
        return None if notice is None else notice.planned(self.size)

    def _passed(self, notice: Notice) -> bool:
        """Whether a synchronisation that has ended is to be told about."""
        if self.parameters[0].device.type != "cpu":
            torch.accelerator.current_stream().synchronize()  # it ends on the device, where this rank runs ahead
        return notice.passed(self.size)

    def _row(self, *, more: bool, filled: bool = False, called: bool = True) -> Row:
        count = None if self.count is None else float(self.count)
        return Row(self.num_micro_batches, count, more, filled, self.void, called, self.size)

    def _table(self, row: Row) -> list[float]:
        return encode(row, self.rank, self.num_ranks)

    @property
    def divisor(self) -> float | torch.Tensor:
        """What the sum of `losses` is to be divided by to be their mean."""
        return self.num_micro_batches if self.count is None else self.count

    def _check_trainable(self) -> None:
        now = [parameter for parameter in self.parameters if parameter.requires_grad]
        if len(now) != len(self._trainable) or any(a is not b for a, b in zip(now, self._trainable, strict=True)):
            raise GradSyncError(
                "Which parameters are trainable must stay the same within a window, but requires_grad changed in the "
                "middle of one. Freeze and unfreeze between windows, where progress.index is 0."
            )


def _check_count(count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int | float | torch.Tensor):
        raise TypeError(
            f"The count of a LossSum must be an int, a float or a tensor, but it is of type {type(count).__name__}. "
            "Pass what the loss is a sum over, such as the number of tokens."
        )
