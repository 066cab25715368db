"""States as another process gets them: plain values, through a file."""

from __future__ import annotations

import io

import torch


def is_plain(value) -> bool:
    """Numbers, strings, lists, dicts, and tensors that are nothing more."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and not value.requires_grad
    return value is None or type(value) in {int, float, bool, str}


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
