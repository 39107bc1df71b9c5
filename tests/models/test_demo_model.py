"""The demo model itself, where it has been made: eight chats of different lengths equal generate(), TP 1 and 3."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from launcher import envs
from launcher.models.demo import _DEMO, is_whole
from launcher.models.worker import TransformersWorker
from tests.models.conftest import Reference
from tests.models.driver import Driver, Request, settings, started
from tests.models.tensor_ranks import TensorRanks

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.keeps_descriptors,
    pytest.mark.timeout(400),
]
CHATS = [
    "Hi!",
    "What is the capital of France?",
    "List the first ten prime numbers.",
    "Summarise: " + "The quick brown fox jumps over the lazy dog. " * 20,
    "Write a poem about rain.",
    "Why is the sky blue? " * 12,
    "Tell me about bees.",
    "How do I bake bread at home, step by step?",
]
COUNT = 8


@pytest.fixture(scope="module")
def model() -> Path:
    directory = envs.cache_dir() / "models" / _DEMO
    if not is_whole(directory):
        pytest.skip("the demo model has not been made: scripts/make_demo_model")
    return directory


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for chat in CHATS
    ]


def served(driver: Driver, prompts: list[list[int]]) -> list[list[int]]:
    requests = [driver.add(Request(prompt, COUNT)) for prompt in prompts]
    driver.run()
    return [request.output for request in requests]


def test_it_equals_generate(model: Path, prompts: list[list[int]], reference: Reference, tmp_path: Path) -> None:
    worker = started(TransformersWorker(settings(str(model), num_threads=2)))
    alone = served(Driver(worker.execute_model, budget=96), prompts)
    worker.shutdown()
    assert alone == [reference(model, prompt, COUNT) for prompt in prompts]
    with TensorRanks(model, 3, tmp_path) as ranks:
        assert served(Driver(ranks.execute, budget=96), prompts) == alone
