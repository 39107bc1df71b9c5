"""Tiny models, made once per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

# Imported for its effect: torch sets a variable when its compiler is first imported, which is no test's fault.
from launcher.models import preload as preload
from launcher.models.tiny import make_tiny

Reference = Callable[[Path, list[int], int], list[int]]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=1)


@pytest.fixture(scope="session")
def tiny_for_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("three"), heads=9, kv_heads=3)


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Greedy tokens by transformers' own `generate`."""
    models: dict[Path, object] = {}

    def generate(directory: Path, prompt: list[int], count: int) -> list[int]:
        if directory not in models:
            models[directory] = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        model = models[directory]
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            found = model.generate(  # type: ignore[attr-defined]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=2,
            )
        return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    return generate
