"""Which device is a rank's: every kind of accelerator, on one host and on several ranks."""

from __future__ import annotations

import pytest
import torch

import gradsync
from gradsync.launch import device

# (kind, devices to be seen, local rank, backend or None on one rank) -> device
PLACES = [
    (None, 0, 0, None, "cpu"),
    (None, 0, 1, "gloo", "cpu"),
    ("cuda", 8, 0, None, "cuda:0"),
    ("cuda", 8, 3, "nccl", "cuda:3"),
    ("cuda", 8, 3, "gloo", "cuda:3"),
    ("cuda", 8, 3, "cpu:gloo,cuda:nccl", "cuda:3"),
    ("cuda", 8, 3, "cpu:gloo", "cpu"),
    ("cuda", 1, 3, "nccl", "cuda:0"),  # a launcher that shows each rank its own
    ("xpu", 4, 2, "xccl", "xpu:2"),
    ("xpu", 4, 2, "gloo", "cpu"),  # which does not move its tensors
    ("mps", 1, 0, None, "mps:0"),
    ("mps", 1, 1, "gloo", "cpu"),
    ("hpu", 2, 1, "hccl", "hpu:1"),  # a kind and a backend that torch does not know
]


def show(monkeypatch, kind, count):
    """No machine has all of these: what torch.accelerator says is all that is asked."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(("kind", "count", "local_rank", "backend", "expected"), PLACES)
def test_the_device_of_a_rank(monkeypatch, kind, count, local_rank, backend, expected):
    show(monkeypatch, kind, count)
    assert device.device_of(local_rank, backend) == torch.device(expected)


def test_more_ranks_than_devices_is_an_error(monkeypatch):
    show(monkeypatch, "cuda", 2)
    with pytest.raises(gradsync.GradSyncError, match=r"LOCAL_RANK is 2 on a host with 2 cuda devices. Start at most 2"):
        device.device_of(2, "nccl")


@pytest.mark.parametrize(("kind", "backend"), [(None, "gloo"), ("cuda", "nccl"), ("xpu", "xccl"), ("mps", "gloo")])
def test_the_default_backend(monkeypatch, kind, backend):
    show(monkeypatch, kind, 1)
    assert device.default_backend() == backend
