"""`Talk`: the tables that ranks exchange in a loop. A table names the run that it is about, by its key."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from gradsync._errors import GradSyncError
from gradsync.functional._team.team import Team
from gradsync.functional._window.driver import Run
from gradsync.functional._window.steps_and_tail import ends_with_data
from gradsync.functional._window.table import NOBODY, Share
from gradsync.ranks.line import Sent, device_of
from gradsync.ranks.lost import WaitingFor
from gradsync.ranks.meet import ONE_FORWARD, agreed, ranks_where


class Talk:
    """What the ranks tell each other in a loop. The key of its run names a window."""

    def __init__(self, name: str, runs: Callable[[], Sequence[Run]]) -> None:
        """`runs` returns the runs that may be called in the loop, as far as this rank knows them."""
        self.name = name
        self.runs = runs
        self.called: list[Run] = []  # in the order of their first call
        self.chief: Run | None = None  # the tables go over the ranks of its team
        self.shares: Sequence[Share] = ()  # what the ranks said last

    @property
    def known(self) -> list[Run]:
        """The runs that the loop may call, as far as this rank knows, in an order that is the same on all ranks."""
        return sorted(dict.fromkeys((*self.runs(), *self.called)), key=lambda run: run.key)

    @property
    def team(self) -> Team:
        """The team of the chief, once the ranks have met."""
        assert self.chief is not None, "they have met"
        assert self.chief.team is not None, "they have met"
        return self.chief.team

    @property
    def is_in_lockstep(self) -> bool:
        """Whether the ranks run each call together, in one window of the loop and so in all."""
        for run in self.called:  # asked in each call, where a generator would cost more than the answer
            if run.team is not None and run.team.lockstep:
                return True
        return self.chief is not None and self.team.lockstep

    @property
    def first_open(self) -> float:
        """The key of the first window that is open here and that the end of the data closes."""
        opened = [run.key for run in self.known if run.index and ends_with_data(run.terms.tail)]
        return float(min(opened)) if opened else NOBODY

    def send(self, share: Share) -> Sent:
        """Send this rank's share, without waiting."""
        return self.team.line.send(share.row())

    def ask(self, share: Share) -> list[Share]:
        """Before a micro-batch whose forward communicates: what each rank says of it, and whether it has more."""
        return self.answers(self.question(share))

    def question(self, share: Share) -> Sent:
        """The same, without waiting: `answers` reads it later."""
        team = self.team
        for group in team.twins:
            share = share._replace(failed=share.failed + _twins_differ(group, share, team.parameters))
        return self.send(share)

    def answers(self, sent: Sent) -> list[Share]:
        """What each rank said. Raises on every rank if they contradict each other."""
        with WaitingFor(lambda: f"the next micro-batch of {self.name}"):
            shares = [Share.of(row) for row in sent.rows()]
        apart = ranks_where(bool(share.failed) for share in shares)
        if apart:
            raise GradSyncError(
                "All ranks of a tensor-parallel group must come to the same micro-batches, but those of data-parallel "
                f"rank {apart} do not: some have one, or more of them, and others not. {ONE_FORWARD}"
            )
        agreed([(r, int(share.size)) for r, share in enumerate(shares) if share.size], "number of steps in a window")
        self.check_same(shares)
        return shares

    def announce(self, run: Run) -> None:
        """Tell the other ranks of a run that is new to this loop, and whose team all ranks must make."""
        shares = self.shares
        # Where nobody has more, ranks whose data has ended have left the loop, and would not answer.
        if any(share.left for share in shares) or all(share.closing != NOBODY for share in shares):
            shares = self.ask(Share(closing=float(run.key), left=1.0))
        if any(share.closing == NOBODY for share in shares):
            raise self._nothing_known(shares)

    def closing(self, shares: Sequence[Share]) -> Run | None:
        """The run whose window closes next, or whose call it is; None if all ranks have ended and none is open."""
        closing = max(share.closing for share in shares)
        opened = [share.open for share in shares if share.open != NOBODY]
        if closing == NOBODY and not opened:
            return None
        key = min(opened) if closing == NOBODY else closing
        run = next((run for run in self.known if run.key == key), None)
        if run is None:
            raise self._nothing_known(shares)
        return run

    def check_same(self, shares: Sequence[Share]) -> None:
        """Raise on every rank if the ranks close windows of different runs."""
        closing = {share.closing for share in shares if share.closing != NOBODY}
        if len(closing) > 1:
            raise GradSyncError(
                f"All ranks must come to the same windows of {self.name} in the same order, but "
                + ", ".join(
                    f"rank {r} is at number {int(s.closing)}" for r, s in enumerate(shares) if s.closing != NOBODY
                )
                + " of those that the loop calls. Call the functions in one order on all ranks."
            )

    def check_keys(self) -> None:
        """Raise for two runs of one key: the ranks could not tell their windows apart."""
        keys = [run.key for run in self.known]
        if len(set(keys)) < len(keys):
            raise GradSyncError(
                f"Each run that is called in {self.name} needs a key of its own, the same on all ranks, but the keys "
                f"are {', '.join(map(str, keys))}. Pass key= to functional.Run: 0, 1, ..."
            )

    def _nothing_known(self, shares: Sequence[Share]) -> GradSyncError:
        absent = ranks_where(share.closing == NOBODY for share in shares)
        return GradSyncError(
            f"Every rank needs an item for each function, model and optimizer that is called in {self.name}, but rank "
            f"{absent} had run out when the first window of one of them was opened, and does not know it. Give each "
            "rank an item that calls it, or name the models and optimizers."
        )


def _twins_differ(group: dist.ProcessGroup, share: Share, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """1 if ranks that run a forward together (tensor parallelism) say different things, else 0; no host wait."""
    said = (share.left > 0, share.closing != NOBODY, share.once > 0)
    device = device_of(group, parameters)
    alike = torch.stack([torch.full((), float(one), device=device) for one in said])
    dist.all_reduce(alike, group=group)
    return ((alike > 0) & (alike < group.size())).any().double()
