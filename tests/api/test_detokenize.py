from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from launcher.api.detokenize import Detokenizer, StopStrings

REPLACEMENT = "\ufffd"


def decode_bytes(ids: Sequence[int]) -> str:
    """A tokenizer with one token per byte."""
    return bytes(ids).decode(errors="replace")


def decode_words(ids: Sequence[int]) -> str:
    """As sentencepiece writes: every token begins with a space, which the first of a text loses. 0 has no text."""
    return "".join(f" w{i}" for i in ids if i).removeprefix(" ")


def stream(decode, ids, context=()):
    detokenizer = Detokenizer(decode, context)
    parts = [detokenizer.push(token) for token in ids]
    return parts, detokenizer.flush()


@given(st.text())
def test_joined_parts_are_the_text_and_no_part_holds_half_a_character(text: str) -> None:
    parts, rest = stream(decode_bytes, list(text.encode()))
    assert "".join(parts) + rest == text
    assert REPLACEMENT in text or all(REPLACEMENT not in part for part in parts)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_text_come_out_as_decoding_all_gives_them(data: bytes) -> None:
    parts, rest = stream(decode_bytes, list(data))
    whole = decode_bytes(data)
    # A run that is no text for very long is given out as it stands; up to there nothing differs.
    assert "".join(parts) + rest == whole or len(data) > 60


@given(st.lists(st.integers(0, 5), max_size=30))
def test_a_decoder_that_strips_the_first_space_is_followed(ids: list[int]) -> None:
    parts, rest = stream(decode_words, ids)
    assert "".join(parts) + rest == decode_words(ids)


def test_text_that_continues_a_prompt_keeps_its_first_space() -> None:
    parts, rest = stream(decode_words, [7, 8], context=[5, 6])
    assert "".join(parts) + rest == " w7 w8"


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    euro = "€".encode()
    parts, rest = stream(decode_bytes, [euro[2], 65], context=[66, *euro[:2]])
    assert ("".join(parts) + rest).endswith("A")


def test_endless_garbage_comes_out_within_the_window() -> None:
    parts, _ = stream(decode_bytes, [0xFF] * 1000)
    assert len("".join(parts)) > 900


def test_half_a_character_at_the_end_is_a_replacement_character() -> None:
    parts, rest = stream(decode_bytes, list("aé".encode()[:-1]))
    assert ("".join(parts), rest) == ("a", REPLACEMENT)


# --- stop strings ----------------------------------------------------------------------------------------------------


def expected(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """By the definition: the first character at which a stop string is complete; the longest that ends there."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


ALPHABET = st.sampled_from("ab")


@given(
    st.lists(st.text(ALPHABET, max_size=4), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4),
)
def test_found_exactly_however_the_text_is_cut(parts: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    out = ""
    found = False
    for part in parts:
        new, found = matcher.feed(part)
        out += new
        if found:
            break
        # What is out can never be part of a stop string that is found later, and nothing is held without need.
        seen = "".join(parts)
        assert seen.startswith(out)
    if not found:
        out += matcher.flush()
    assert (out, found) == expected("".join(parts), stops)


@given(st.text(ALPHABET, max_size=12), st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    out, found = StopStrings(stops).feed(text)
    if not found:
        held = text[len(out) :]
        longest = max((k for s in stops for k in range(len(s)) if text.endswith(s[:k])), default=0)
        assert len(held) == longest


def test_unarmed_text_passes_but_may_begin_a_later_find() -> None:
    matcher = StopStrings(["aa"])
    assert matcher.feed("aa", armed=False) == ("a", False)
    assert matcher.feed("a") == ("", True)


def test_a_long_stop_string_is_searched_in_linear_time() -> None:
    stop = "a" * 20_000 + "b"
    matcher = StopStrings([stop])
    for _ in range(200):
        matcher.feed("a" * 100)
    assert matcher.feed("ab")[1]
