"""What the README says of uneven ranks in words and in its picture, on ranks."""

from __future__ import annotations

from itertools import takewhile

import torch
import torch.distributed as dist

import gradsync
from tests.support.compare import assert_equal_state
from tests.support.models import small_model
from tests.support.reference import cut, mean_loss, micro_batch, states, window_mean

ITEMS = [7, 5, 4]  # of each rank, as in the picture


def uneven(stop_after: int | None) -> tuple[list[bool], list[int], dict, int]:
    """Whether each call made an update; what a collective in `on_update` added up to; the parameters; the updates."""
    rank = dist.get_rank()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    added: list[int] = []

    def on_update(progress: gradsync.Progress) -> None:
        number = torch.ones(())
        dist.all_reduce(number)
        added.append(int(number))

    @gradsync.accumulating(steps=4, on_update=on_update)
    def train_step(model, optimizer, x):
        return mean_loss(model, x)

    stepped: list[bool] = []
    items = [micro_batch(rank, index) for index in range(ITEMS[rank] if stop_after is None else 20)]
    data = items if stop_after is None else takewhile(lambda _: len(stepped) < stop_after + rank, items)
    for x in train_step.over(data):
        train_step(model, optimizer, x)
        stepped.append(train_step.progress.stepped)
    assert train_step.progress.index == 0
    return stepped, added, model.state_dict(), train_step.progress.updates


def expected(lengths: list[int]) -> dict:
    """On one process: the mean over all that is in a window."""
    return states(small_model(), cut(lengths, 4), window_mean)[-1]


def test_the_picture_of_a_window(ranks) -> None:
    """Each rank's last call in a window is its boundary, and whoever is absent makes the update all the same."""
    came = ranks(3).run(uneven, None)
    held = [False, False, False]
    assert [stepped for stepped, *_ in came] == [[*held, True, False, False, True], [*held, True, True], [*held, True]]
    assert [updates for *_, updates in came] == [2, 2, 2]
    assert [added for _, added, *_ in came] == [[3, 3]] * 3  # a collective in on_update meets every rank's
    for _, _, state, _ in came:
        assert_equal_state(state, expected(ITEMS), 1e-12)


def test_data_that_ends_where_each_rank_likes(ranks) -> None:
    """Stopping by takewhile: an item was drawn ahead already, and counts."""
    came = ranks(3).run(uneven, 5)
    lengths = [len(stepped) for stepped, *_ in came]
    assert len(set(lengths)) == 3
    for _, _, state, _ in came:
        assert_equal_state(state, expected(lengths), 1e-12)
