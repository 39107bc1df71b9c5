"""Tensor parallelism by our own collectives: a model that transformers loaded in shards becomes plain tensors.

transformers reads each rank's slices of the checkpoint (it knows how experts are fused and names are mapped) and wraps
them in DTensors and forwards of its own. `localize` keeps the slices and replaces the wrapping: one `Communicator`,
no mesh, no DTensor dispatch. The styles are the model's own plan (``tp_plan``):

==========================================  ======================================================================
style                                       what a module's forward becomes
==========================================  ======================================================================
colwise, packed_*, replicate*, mla_*, …     its class's own: the slices make it local
rowwise                                     partial product, all-reduce, then the bias
rowwise_split_input, rowwise_rep            the same, on this rank's columns of a whole input
colwise_gather_output, colwise_rep          own columns, then everybody's side by side
embedding_rowwise                           own rows, zero elsewhere, all-reduce
embedding_colwise                           own columns, then everybody's side by side
moe_tp_experts, all_reduce                  its class's own, then all-reduce
moe_identity_expert                         its class's own on 1/size of the input: the experts' sum restores it
==========================================  ======================================================================

A dimension that the size does not divide is cut as `torch.chunk` cuts it: parts of ceil(n / size), the last shorter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from launcher.errors import UsageError
from launcher.parallel.communicators import Communicator

Forward = Callable[..., torch.Tensor]


def span(length: int, rank: int, size: int) -> tuple[int, int]:
    """First and one-past-last index of `rank`'s part of `length`."""
    part = -(-length // size)
    return min(rank * part, length), min((rank + 1) * part, length)


def localize(model: nn.Module, plan: dict[str, str], by: Communicator) -> None:
    """In place. `plan`: module pattern (``layers.*.mlp.up_proj``) → style. Raises UsageError on a style not known."""
    _unwrap(model)
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None:
            continue
        module.__dict__.pop("forward", None)
        if style in _OWN_FORWARD:
            continue
        make = _FORWARDS.get(style)
        if make is None:
            raise UsageError(f"{type(model).__name__} shards {name} by {style!r}, which this worker does not know")
        _check_class(model, name, module, style)
        module.forward = make(module, by)


def _check_class(model: nn.Module, name: str, module: nn.Module, style: str) -> None:
    """The replacements know what a plain linear layer and embedding do, and would drop what a subclass adds."""
    wanted: type[nn.Module] | None = None
    if style.startswith("embedding"):
        wanted = nn.Embedding
    elif style not in ("moe_tp_experts", "all_reduce", "moe_identity_expert"):
        wanted = nn.Linear
    if wanted is None:
        return
    plain = type(module).forward is wanted.forward
    if not plain and not (isinstance(module, wanted) and hasattr(module, "embed_scale")):
        raise UsageError(
            f"{type(model).__name__} has a {type(module).__name__} at {name}, which cannot be sharded here: use --tp 1"
        )


def _unwrap(model: nn.Module) -> None:
    from torch.distributed.tensor import DTensor

    local: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                # By identity: tied weights stay tied.
                if id(parameter) not in local:
                    local[id(parameter)] = nn.Parameter(parameter.to_local().detach(), requires_grad=False)
                module._parameters[name] = local[id(parameter)]


def _rowwise(module: Any, by: Communicator) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = by.all_reduce(F.linear(x, module.weight))
        return y if module.bias is None else y + module.bias

    return forward


def _rowwise_split_input(module: Any, by: Communicator) -> Forward:
    first, end = span(module.in_features, by.rank, by.size)
    inner = _rowwise(module, by)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return inner(x[..., first:end])

    return forward


def _gathered(y: torch.Tensor, full: int, by: Communicator) -> torch.Tensor:
    """Everybody's columns side by side; the last ranks' may be fewer."""
    part = -(-full // by.size)
    if y.shape[-1] < part:
        y = F.pad(y, (0, part - y.shape[-1]))
    return torch.cat(by.all_gather(y), -1)[..., :full]


def _colwise_gather(module: Any, by: Communicator) -> Forward:
    full = module.out_features

    def forward(x: torch.Tensor) -> torch.Tensor:
        return _gathered(F.linear(x, module.weight, module.bias), full, by)

    return forward


def _scaled(module: Any) -> float | None:
    """Some models multiply their embeddings within the module (Gemma)."""
    scale = getattr(module, "embed_scale", None)
    return None if scale is None else float(scale)


def _embedding_rowwise(module: Any, by: Communicator) -> Forward:
    first, end = span(module.num_embeddings, by.rank, by.size)
    scale = _scaled(module)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        # The last of many ranks may own no row: a look-up in none is an error, on a GPU one that ends the context.
        rows = module.weight if end > first else module.weight.new_zeros(1, module.embedding_dim)
        local = ids - first
        elsewhere = (local < 0) | (local >= end - first)
        y = F.embedding(local.masked_fill(elsewhere, 0), rows)
        y = by.all_reduce(y.masked_fill(elsewhere.unsqueeze(-1), 0))
        return y if scale is None else y * torch.tensor(scale, dtype=y.dtype, device=y.device)

    return forward


def _embedding_colwise(module: Any, by: Communicator) -> Forward:
    full = module.embedding_dim
    scale = _scaled(module)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        y = _gathered(F.embedding(ids, module.weight), full, by)
        return y if scale is None else y * torch.tensor(scale, dtype=y.dtype, device=y.device)

    return forward


def _summed(module: Any, by: Communicator) -> Forward:
    inner = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return by.all_reduce(inner(module, *args, **kwargs))

    return forward


def _shared_out(module: Any, by: Communicator) -> Forward:
    inner = type(module).forward

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return inner(module, x / by.size, *args, **kwargs)

    return forward


_OWN_FORWARD = frozenset(
    {"colwise", "packed_colwise", "packed_rowwise", "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj",
     "local_params"}
)  # fmt: skip
_FORWARDS: dict[str, Callable[[Any, Communicator], Forward]] = {
    "rowwise": _rowwise,
    "rowwise_split_input": _rowwise_split_input,
    "rowwise_rep": _rowwise_split_input,
    "colwise_gather_output": _colwise_gather,
    "colwise_rep": _colwise_gather,
    "embedding_rowwise": _embedding_rowwise,
    "embedding_colwise": _embedding_colwise,
    "moe_tp_experts": _summed,
    "all_reduce": _summed,
    "moe_identity_expert": _shared_out,
}
