"""What the warm-start helper imports, so that no worker spends its start on it.

Importing this starts no thread, opens nothing and touches no device: workers are forked from where it was imported.
Besides modules it fills transformers' table of checkpoint renamings, hundreds of compiled patterns that every process
would otherwise compile for itself.
"""

from __future__ import annotations

from torch.distributed import device_mesh, tensor
from transformers import conversion_mapping
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from launcher.models import worker

__all__ = ["conversion_mapping", "device_mesh", "modeling_llama", "modeling_qwen3", "tensor", "worker"]

conversion_mapping.get_checkpoint_conversion_mapping("llama")
