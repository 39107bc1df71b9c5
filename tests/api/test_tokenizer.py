from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from launcher.api.detokenize import Detokenizer
from launcher.api.tokenizer import ModelTokenizer, ReferenceTokenizer, TemplateError, load_tokenizer
from launcher.errors import UsageError
from tests.api.conftest import Asker
from tests.api.fakes import FakeEngine, make_state
from tests.api.models import SPECIAL, make_tokenizer

pytestmark = pytest.mark.keeps_descriptors  # what transformers imports keeps some

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ModelTokenizer:
    return ModelTokenizer(make_tokenizer(tmp_path_factory.mktemp("model")))


def test_reference() -> None:
    tokenizer = load_tokenizer(None)
    assert isinstance(tokenizer, ReferenceTokenizer)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([300, 301]) == "300 301 "
    assert tokenizer.token_bytes(300) == b"300 "
    assert tokenizer.render_chat([*USER, {"role": "assistant", "content": "yo"}], {}) == (
        "user: hi\nassistant: yo\nassistant: "
    )


def test_round_trip(tokenizer) -> None:
    text = "héllo, wörld 😀\n  x" * 20
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    detokenizer = Detokenizer(tokenizer.decode)
    parts = [detokenizer.push(token) for token in ids]
    assert "".join(parts) + detokenizer.flush() == text
    assert not any("\ufffd" in part for part in parts)


def test_special_tokens_have_no_text_but_a_name(tokenizer) -> None:
    end = SPECIAL.index("</s>")
    assert tokenizer.decode([end]) == ""
    assert tokenizer.token_bytes(end) == b"</s>"
    assert tokenizer.vocab_size == 261
    assert tokenizer.decode([1000]) == ""
    assert tokenizer.token_bytes(1000) == b""


def test_every_byte_is_known(tokenizer) -> None:
    got = sorted(tokenizer.token_bytes(token) for token in range(len(SPECIAL), 261))
    assert got == [bytes([i]) for i in range(256)]


def test_chat_template(tokenizer) -> None:
    text = tokenizer.render_chat(USER, {})
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, special=False)
    assert ids[0] == SPECIAL.index("<|im_start|>")
    assert tokenizer.render_chat(USER, {"shout": True}).endswith("!")
    with pytest.raises(TemplateError, match="first message must be of the user"):
        tokenizer.render_chat([{"role": "assistant", "content": "x"}], {})


def test_no_template(tmp_path) -> None:
    tokenizer = ModelTokenizer(make_tokenizer(tmp_path, template=None))
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.render_chat(USER, {})


def test_no_tokenizer(tmp_path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))


def test_many_threads_at_once(tokenizer) -> None:
    with ThreadPoolExecutor(4) as threads:
        lengths = list(threads.map(lambda n: len(tokenizer.encode("ab" * n)), range(100, 300)))
    assert lengths == [2 * n for n in range(100, 300)]


def test_in_the_application(tokenizer, tmp_path) -> None:
    engine = FakeEngine()
    text = "Grüße 😀!"
    engine.script = lambda prompt, params: tokenizer.encode(text)
    state = make_state(engine, tokenizer=tokenizer)
    asker = Asker(state)

    async def main():
        body = {"model": "reference", "messages": USER, "max_tokens": 20, "logprobs": True}
        good = await asker.ask("POST", "/v1/chat/completions", json=body)
        shout = await asker.ask("POST", "/v1/chat/completions", json={**body, "chat_template_kwargs": {"shout": 1}})
        bad = await asker.ask(
            "POST", "/v1/chat/completions", json={**body, "messages": [{"role": "assistant", "content": "x"}]}
        )
        fixed = await asker.ask(
            "POST", "/v1/chat/completions", json={**body, "chat_template_kwargs": {"tokenize": True}}
        )
        raw = await asker.ask(
            "POST", "/v1/completions", json={"model": "reference", "prompt": "x", "logprobs": 0, "max_tokens": 20}
        )
        return good, shout, bad, fixed, raw

    good, shout, bad, fixed, raw = asyncio.run(main())
    choice = good.json()["choices"][0]
    assert choice["message"]["content"] == text
    assert b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]) == text.encode()
    assert shout.json()["usage"]["prompt_tokens"] == good.json()["usage"]["prompt_tokens"] + 1
    assert bad.status_code == 400
    assert bad.json()["error"]["code"] == "chat_template_error"
    assert fixed.status_code == 400
    assert raw.json()["choices"][0]["logprobs"]["tokens"][:4] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc"]
    state.close()
