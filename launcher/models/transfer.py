"""Small copies between host and device that nobody waits for until the result is needed.

Pinned memory comes from torch's cache of it, which gives a piece out again only when the copies that used it are done.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch


def upload(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Each list as int64 on `device`: views of one copy."""
    flat = array("q")
    for numbers in lists:
        flat.extend(numbers)
    return list(_moved(flat, torch.int64, device).split([len(numbers) for numbers in lists]))


def upload_floats(lists: Sequence[Sequence[float]], device: torch.device) -> list[torch.Tensor]:
    """Each list as float64 on `device`: views of one copy."""
    flat = array("d")
    for numbers in lists:
        flat.extend(numbers)
    return list(_moved(flat, torch.float64, device).split([len(numbers) for numbers in lists]))


def upload_bytes(data: bytes, device: torch.device) -> torch.Tensor:
    """uint8"""
    return _moved(bytearray(data), torch.uint8, device)


def download(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All in host memory, finished: one wait, not one for each."""
    if not any(tensor.is_cuda for tensor in tensors):
        return list(tensors)
    found = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    return found


def _moved(data: array[int] | array[float] | bytearray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype, device=device)
    here = torch.frombuffer(data, dtype=dtype)
    if device.type != "cuda":
        return here.to(device)
    pinned = torch.empty(len(here), dtype=dtype, pin_memory=True).copy_(here)
    return pinned.to(device, non_blocking=True)
