from __future__ import annotations

import asyncio
from array import array

import pytest

from launcher.api.errors import ApiError
from launcher.api.sequence import SequenceSpec, SequenceText, collect, run_all
from launcher.api.tokenizer import ReferenceTokenizer
from launcher.engine.messages import RequestOutput, SamplingParams, TokenLogprobs, pack
from tests.api.fakes import FakeEngine, make_state


class Bytes(ReferenceTokenizer):
    """A token is a byte of UTF-8."""

    def decode(self, ids) -> str:
        return bytes(ids).decode(errors="replace")


def spec(prompt=(1,), *, stops=(), continues=False, **params) -> SequenceSpec:
    return SequenceSpec("r", 0, list(prompt), SamplingParams(**params), stops, continues)


def output(tokens, finish=None, stop=None, logprobs=()) -> RequestOutput:
    return RequestOutput("r", pack(list(tokens)), finish, stop, logprobs)


def note(token: int) -> TokenLogprobs:
    return TokenLogprobs(pack([token]), array("f", [-1.0]).tobytes(), 0)


def test_notes_wait_for_their_text_and_know_their_place() -> None:
    text = SequenceText(spec(), Bytes())
    first, second, third = "aé".encode()
    a = text.feed(output([first], logprobs=(note(first),)))
    assert (a.text, [n.offset for n in a.notes]) == ("a", [0])
    half = text.feed(output([second], logprobs=(note(second),)))
    assert (half.text, half.notes, half.tokens) == ("", [], 1)
    whole = text.feed(output([third], "length", logprobs=(note(third),)))
    assert (whole.text, [n.offset for n in whole.notes], whole.finish) == ("é", [1, 1], "length")


def test_what_is_held_back_comes_at_the_end() -> None:
    text = SequenceText(spec(stops=("END",)), Bytes())
    assert text.feed(output(b"xEN")).text == "x"
    assert text.feed(output([0xC3], "length")).text == "EN\ufffd"


def test_a_stop_string_completed_by_the_flush_is_found() -> None:
    text = SequenceText(spec(stops=("x\ufffd",)), Bytes())
    last = text.feed(output([ord("a"), ord("x"), 0xC3], "length"))
    assert (last.text, last.finish) == ("a", "stop")


def test_a_stop_string_before_the_stop_token() -> None:
    text = SequenceText(spec(stops=("b",)), Bytes())
    last = text.feed(output(b"abc\0", "stop", 0))
    assert (last.text, last.finish, last.tokens) == ("a", "stop", 2)


def test_the_same_token_earlier_is_text() -> None:
    text = SequenceText(spec(), Bytes())
    last = text.feed(output(b"aba", "stop", ord("a")))
    assert (last.text, last.tokens) == ("ab", 3)


def test_an_empty_output_is_no_piece_but_an_end_is() -> None:
    text = SequenceText(spec(), Bytes())
    assert text.feed(output([])) is None
    assert text.feed(output([], "length")).finish == "length"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_engine_that_gives_up(reason) -> None:
    with pytest.raises(ApiError, match="the reason" if reason == "error" else "aborted") as caught:
        SequenceText(spec(), Bytes()).feed(
            RequestOutput("r", b"", reason, error="the reason" if reason == "error" else "")
        )
    assert (caught.value.status, caught.value.code) == (500, f"engine_{reason}")


def test_a_character_begun_in_the_prompt() -> None:
    euro = "€".encode()
    text = SequenceText(spec(euro[:2], continues=True), Bytes())
    assert text.feed(output([euro[2]], "length")).finish == "length"


def test_an_engine_without_a_last_word_is_an_error() -> None:
    engine = FakeEngine()
    engine.script = lambda prompt, params: []
    state = make_state(engine)

    async def main() -> None:
        await collect(run_all(state, ReferenceTokenizer(), [spec()]), 1)

    with pytest.raises(ApiError, match="without a word"):
        asyncio.run(main())
    assert state.engines[0].running == 0
    state.close()


def test_the_first_error_ends_all_choices() -> None:
    good, bad = FakeEngine(), FakeEngine()
    bad.dies_after, good.gap = 0, 0.01
    state = make_state(good, bad)
    specs = [SequenceSpec(f"r{i}", i, [1], SamplingParams(max_tokens=400)) for i in range(2)]

    async def main() -> None:
        await collect(run_all(state, ReferenceTokenizer(), specs), 2)

    with pytest.raises(Exception, match="gone"):
        asyncio.run(main())
    assert good.aborted == ["r0"]
    assert [slot.running for slot in state.engines] == [0, 0]
    state.close()
