"""Which Hugging Face model types the Transformers worker carries, as seen with transformers 5.24. Data, no imports.

Each was run as a small random model: prompt chunks and single tokens over the paged cache against the model's own
attention, and, where it has a tensor-parallel plan, two ranks against one; fp32, differences below 1e-5. A type that is
in no table may work: the worker proves every model at load and refuses one that runs wrong.
"""

from __future__ import annotations

TENSOR_PARALLEL = frozenset(
    {
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "gemma",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "granite",
        "granitemoe",
        "helium",
        "hunyuan_v1_dense",
        "llama",
        "minimax_m2",
        "ministral",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
"""Right on one rank and on two."""

SINGLE_RANK = frozenset({"biogpt", "bitnet", "gpt2", "gpt_bigcode", "opt", "persimmon", "stablelm"})
"""Right on one rank; transformers has no tensor-parallel plan for them: refuse ``--tp`` above 1."""

REFUSED: dict[str, str] = {
    "bloom": "its attention does not go through transformers' attention interface",
    "diffllama": "its attention combines two maps, which the paged attention does not",
    "doge": "it brings an attention mask of its own",
    "falcon": "its attention does not go through transformers' attention interface",
    "gemma2": "it needs soft-capped attention scores",
    "gpt_oss": "it needs attention sinks",
    "jamba": "some of its layers are no attention layers",
    "mamba": "its layers are no attention layers",
    "mpt": "its attention does not go through transformers' attention interface",
    "qwen3_next": "some of its layers are no attention layers",
    "vaultgemma": "it needs soft-capped attention scores",
    "xglm": "its attention does not go through transformers' attention interface",
}
"""Would run wrong or not at all: model type → why, as the end of a sentence."""
