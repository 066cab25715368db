"""`LoopKnowledge`: what a rank knows of a loop, and the tables by which ranks tell each other of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType

import torch
import torch.distributed as dist

from gradsync._errors import GradSyncError
from gradsync.functional._loop.counted_items import CountedItems
from gradsync.functional._team.team import Team
from gradsync.functional._window.run import Run
from gradsync.functional._window.share import NOBODY, Share, insist_on_one_size, shares_in
from gradsync.functional._window.terms import ends_with_data
from gradsync.ranks.lost import WaitingFor
from gradsync.ranks.meet import ONE_FORWARD, ranks_where
from gradsync.ranks.tables import Sent, device_of


class LoopKnowledge:
    """The data of a loop here, the runs that it calls, and what all ranks have said of theirs. `Loop` extends it."""

    def __init__(self, name: str, data: CountedItems, runs: Callable[[], Sequence[Run]]) -> None:
        """`runs` returns the runs that may be called in the loop, as far as this rank knows them."""
        self.name = name
        self.data = data
        self.runs = runs
        self.called: list[Run] = []  # in the order of their first call; the first one's team is that of the tables
        self.lengths: Sequence[int | None] = [data.length]  # of all ranks' data, once they have met
        # What the ranks said as they met, or at the last boundary. A plan makes `left` unknown.
        self.shares: Sequence[Share] = ()
        self.driver: tuple[int, CodeType] | None = None  # the function call that draws the items
        # Where forwards communicate:
        self.planned: int | None = None  # calls in the open window; None where the ranks must ask
        self.asked: tuple[Run, Sent] | None = None  # the run whose next call was asked about, and the answers

    @property
    def known(self) -> list[Run]:
        """The runs that the loop may call, as far as this rank knows, in an order that is the same on all ranks."""
        return sorted(dict.fromkeys((*self.runs(), *self.called)), key=lambda run: run.key)

    @property
    def only_run(self) -> Run | None:
        """The run of the loop, if this rank knows of no other."""
        known = self.known
        return known[0] if len(known) == 1 else None

    @property
    def team(self) -> Team:
        """The team over whose ranks the tables go, once these have met."""
        team = self.called[0].team
        assert team is not None, "they have met"
        return team

    @property
    def is_even(self) -> bool:
        """Whether all ranks are known to have equally many items."""
        return None not in self.lengths and len(set(self.lengths)) == 1

    @property
    def is_in_lockstep(self) -> bool:
        """Whether the ranks run each call together. If one run of the loop needs that, all its runs do it."""
        for run in self.called:  # noqa: SIM110 - in each call, where a generator would cost more than the answer
            if run.team is not None and run.team.goes_together:
                return True
        return False

    @property
    def first_open(self) -> float:
        """The key of the first run whose open window here closes as the data ends; NOBODY if there is none."""
        opened = (float(run.key) for run in self.known if run.index and ends_with_data(run.terms.tail))
        return min(opened, default=NOBODY)

    @property
    def is_over(self) -> bool:
        """Whether no rank has items left, or a window that is still to be closed."""
        if not self.called or self.team.is_alone:
            return self.first_open == NOBODY
        some = any(share.left or share.open != NOBODY for share in self.shares)
        return not some and self.only_run is not None and self.only_run.window is None

    def foresees(self, run: Run) -> bool:
        """Whether each item has had one call, of this run. Then this rank knows as many calls ahead as items."""
        data = self.data
        once = data.has_ended or (data.calls_once(run) and not data.num_idle)
        return once and self.only_run is not None

    def with_data(self, run: Run, share: Share) -> Share:
        """The share, with what this rank says of its data."""
        data = self.data
        key, opened = (NOBODY, self.first_open) if data.has_ended else (float(run.key), NOBODY)
        return share._replace(run_key=key, open=opened, left=data.left(run), once=float(self.foresees(run)))

    # -- tables -----------------------------------------------------------------------------------------------------

    def tell(self, share: Share) -> Sent:
        """Send this rank's share, without waiting."""
        return self.team.tables.send(share.row())

    def ask(self, share: Share) -> list[Share]:
        """Before a micro-batch whose forward communicates: what each rank says of it, and whether it has more."""
        return self.answers(self.question(share))

    def question(self, share: Share) -> Sent:
        """The same, without waiting: `answers` reads it later."""
        for group in self.team.twins:
            share = share._replace(failed=share.failed + _twins_differ(group, share, self.team.parameters))
        return self.tell(share)

    def answers(self, sent: Sent) -> list[Share]:
        """What each rank said. Raises on every rank if they contradict each other."""
        with WaitingFor(lambda: f"the next micro-batch of {self.name}"):
            shares = shares_in(sent)
        apart = ranks_where(bool(share.failed) for share in shares)
        if apart:
            raise GradSyncError(
                "All ranks of a tensor-parallel group must come to the same micro-batches, but those of data-parallel "
                f"rank {apart} do not: some have a micro-batch, or further ones, that others lack. {ONE_FORWARD}"
            )
        insist_on_one_size(shares)
        self.check_same(shares)
        return shares

    def announce(self, run: Run) -> None:
        """Tell the other ranks of a run that is new to this loop, and whose team all ranks must make."""
        shares = self.shares
        # Where nobody has more, ranks whose data has ended have left the loop, and would not answer.
        if any(share.left for share in shares) or all(share.run_key != NOBODY for share in shares):
            shares = self.ask(Share(run_key=float(run.key), left=1.0))
        if any(share.run_key == NOBODY for share in shares):
            raise _not_known(self.name, shares)

    def run_to_close(self, shares: Sequence[Share]) -> Run | None:
        """The run whose window closes next, or whose call it is; None if all ranks have ended and none is open."""
        self.check_same(shares)
        named = max(share.run_key for share in shares)
        opened = [share.open for share in shares if share.open != NOBODY]
        if named == NOBODY and not opened:
            return None
        key = min(opened) if named == NOBODY else named
        run = next((run for run in self.known if run.key == key), None)
        if run is None:
            raise _not_known(self.name, shares)
        return run

    def check_same(self, shares: Sequence[Share]) -> None:
        """Raise on every rank if the ranks close windows of different runs."""
        named = [(rank, int(share.run_key)) for rank, share in enumerate(shares) if share.run_key != NOBODY]
        if len({key for _, key in named}) > 1:
            known = {run.key: f"number {place} ({run.name})" for place, run in enumerate(self.known, 1)}
            raise GradSyncError(
                f"All ranks must come to the same windows of {self.name} in the same order, but "
                + ", ".join(f"rank {rank} is at {known.get(key, 'one that this rank lacks')}" for rank, key in named)
                + ", of those that the loop calls. Call the functions in one order on all ranks; with tail='carry', "
                "give them equally many items."
            )


def _not_known(name: str, shares: Sequence[Share]) -> GradSyncError:
    absent = ranks_where(share.run_key == NOBODY for share in shares)
    return GradSyncError(
        f"Every rank needs an item that calls each function with each of its models and optimizers in {name}, but rank "
        f"{absent} had run out before one of them had its first window, and does not know it. Give each rank such an "
        "item, or name the models and optimizers."
    )


def _twins_differ(group: dist.ProcessGroup, share: Share, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """1 if ranks that run a forward together (tensor parallelism) say different things, else 0; no host wait."""
    said = (share.left > 0, share.run_key != NOBODY, share.once > 0)
    device = device_of(group, parameters)
    alike = torch.stack([torch.full((), float(one), device=device) for one in said])
    dist.all_reduce(alike, group=group)
    return ((alike > 0) & (alike < group.size())).any().double()
