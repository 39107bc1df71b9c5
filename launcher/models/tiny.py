"""Tiny random models with a byte tokenizer and a chat template, made on the spot: nothing is downloaded.

For tests, and for a demonstration where no real model can be had. They answer nonsense, always the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from launcher.errors import UsageError

Kind = Literal["llama", "qwen3"]
VOCABULARY = 320
"""At least the tokenizer's 261; a round number that many TP sizes divide."""
_SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
_EOS = _SPECIAL.index("<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Any:
    """One token per byte, and the special ones: any text goes there and back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token=_SPECIAL[0]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        additional_special_tokens=["<|im_start|>"],
        **dict(zip(("unk_token", "bos_token", "pad_token", "eos_token"), (*_SPECIAL[:3], _SPECIAL[4]), strict=True)),
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def make_tiny(
    directory: Path | str,
    kind: Kind = "llama",
    *,
    heads: int = 8,
    kv_heads: int = 4,
    layers: int = 4,
    head_dim: int = 8,
    max_model_len: int = 2048,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write config, fp32 weights and tokenizer into `directory` (made if missing); returns it.

    `config` goes to the model's configuration as it is (``sliding_window`` …). Raises UsageError for another kind.
    """
    classes = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    if kind not in classes:
        raise UsageError(f"a tiny model of kind {kind!r} cannot be made; known: {', '.join(classes)}")
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * head_dim,
        "intermediate_size": heads * head_dim * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": kind == "llama",
        "bos_token_id": 1,
        "eos_token_id": _EOS,
        "pad_token_id": 2,
        # Wide enough that the best token is far ahead of the second: rounding does not change the choice.
        "initializer_range": 0.2,
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(classes[kind](**settings), dtype=torch.float32)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
    byte_tokenizer().save_pretrained(directory)
    return directory
