"""The buffer hook for torch's CPU tensors, in any dtype. Imported by `launcher.ipc.hooks` when a tensor is met."""

from __future__ import annotations

import re
from typing import Any

import torch

from launcher.ipc.hooks import Buffer, BufferHook, check_shape

_DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
    and str(dtype) == f"torch.{name}"
    and not name.startswith(("q", "bits"))
    and not re.fullmatch(r"u?int[1-7]|float4.*", name)
}
"""By name, those of whole bytes."""


def take(tensor: Any) -> tuple[Any, memoryview] | None:
    """Dense CPU tensors and parameters; others (sparse, quantised, on a device) are left to pickle."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return None
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return None
    if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        return None
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    facts = (
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        tensor.requires_grad,
        kind is not torch.Tensor,
    )
    return facts, memoryview(dense.reshape(-1).view(torch.uint8).numpy())


def make(facts: Any, buffer: Buffer) -> torch.Tensor:
    name, shape, requires_grad, is_parameter = facts
    dtype = _DTYPES[name]
    shape = check_shape(shape, dtype.itemsize, buffer)
    if not buffer:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        # Bytes first: frombuffer does not know every dtype, a view does.
        tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


HOOK = BufferHook("torch", take, make)
