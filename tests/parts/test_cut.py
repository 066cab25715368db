"""What is cut among a call's arguments, and what is handed on."""

from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch

from gradsync import GradSyncError
from gradsync.parts import count_rows, cut_rows, is_out_of_memory
from gradsync.parts.loss_of_parts import add
from gradsync._loss import LossSum

Pair = namedtuple("Pair", "x y")


def test_every_number_of_rows_and_parts():
    """Parts are views, differ by one row at most, and are all rows in order."""
    for rows in range(1, 12):
        for parts in range(1, 14):
            x = torch.arange(rows)
            pieces = [args[0] for args, _ in cut_rows((x,), {}, parts)]
            assert torch.equal(torch.cat(pieces), x)
            assert len(pieces) == min(rows, parts)
            sizes = list(map(len, pieces))
            assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
            assert all(one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for one in pieces)


def test_structures():
    """Through tuples, lists, named tuples and mappings of any class; everything else is the same object."""
    x, scale, model = torch.arange(4), torch.tensor(2.0), torch.nn.Linear(1, 1)
    names = ["a", "b", "c", "d"]
    args = (model, Pair(x, [x, scale]), UserDict(x=x, names=names), OrderedDict(x=x), names)
    parts = cut_rows(args, {"more": {"x": (x, None)}}, 2)
    for (m, pair, user, ordered, n), kwargs in parts:
        assert m is model and n is names and pair.y[1] is scale and user["names"] is names
        assert type(pair) is Pair and type(user) is UserDict and type(ordered) is OrderedDict
        assert len(pair.x) == len(pair.y[0]) == len(user["x"]) == len(ordered["x"]) == len(kwargs["more"]["x"][0]) == 2
    assert len(args[2]["x"]) == 4  # the caller's is as it was


def test_disagreement_names_both():
    """Arguments that have different numbers of rows, or none that can be cut, are a sentence."""
    with pytest.raises(GradSyncError, match=r"argument 0 has 4 and argument 'batch'\['y'\]\[1\] has 3"):
        count_rows((torch.zeros(4),), {"batch": {"y": [torch.zeros(4), torch.zeros(3)]}})
    with pytest.raises(GradSyncError, match="needs plain tensors, but argument 0 is torch.sparse_coo"):
        count_rows((torch.eye(3).to_sparse(),), {})
    assert count_rows((1, torch.tensor(1.0)), {}) is None


def test_counts_add_up_exactly():
    """Of any type: whole numbers beyond float32, small integer types, floats."""
    def total(*counts):
        whole = None
        for count in counts:
            whole = add(whole, LossSum(torch.tensor(1.0), count), 1.0)
        assert whole.loss == len(counts)
        return whole.count

    assert total(2**53, 1) == 2**53 + 1
    assert total(torch.tensor(200, dtype=torch.uint8), torch.tensor(200, dtype=torch.uint8)) == 400
    assert total(torch.tensor(2**24), 1.0).item() == 2**24 + 1
    assert total(torch.tensor(0.1, dtype=torch.float64), 2) == 2.1


def test_what_is_out_of_memory():
    """Torch's own error, Python's, and messages of the allocators; nothing else."""
    assert all(map(is_out_of_memory, (torch.OutOfMemoryError("x"), MemoryError())))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("shape")) and not is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert is_out_of_memory(raised.value)
