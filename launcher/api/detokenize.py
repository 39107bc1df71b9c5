"""Tokens to text, one at a time, and the search for stop strings. No I/O, no engine: exact and testable.

A token is no character: it may hold half of one, and a tokenizer may render it differently after another token. So text
is decoded in a small window, of which the first part is context that was given out before:

    ids  …  x  x  x | c  c  c | n  n        c: context, already given out; n: new, perhaps not a whole character yet
            window start ^     ^ read

and given out up to the last whole character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW_LIMIT = 64
"""Tokens. A character has at most 4 bytes, so a longer run without a whole one at its end is no text: give it out."""


class Detokenizer:
    """Incremental text of one sequence. `context`: tokens before the first (a prompt's tail), never given out.

    What `push` and `flush` return, joined, is the text of the whole sequence.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context)
        self._read = len(self._window)
        """Tokens of the window that are context."""
        self._given = len(decode(self._window)) if self._window else 0
        """Characters of the window's text that were given out."""

    def push(self, token: int) -> str:
        """Whole characters that became certain with this token; often ``""`` in the middle of a character."""
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(_REPLACEMENT)
        if len(whole) < len(text) and len(self._window) < _WINDOW_LIMIT:
            return self._give(whole)
        new = self._give(text)
        if not new and len(self._window) < _WINDOW_LIMIT:
            return ""  # a special token has no text, and would be no context: some decoders strip what then comes first
        # The context of the next token is this one; what stood before it cannot change its text any more.
        del self._window[: self._read]
        self._read = len(self._window)
        self._given = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        """What is left at the end: half characters, as replacement characters."""
        return self._give(self._decode(self._window)) if len(self._window) > self._read else ""

    def _give(self, text: str) -> str:
        new = text[self._given :]
        self._given = max(self._given, len(text))
        return new


class _Pattern:
    """One stop string as an automaton: `state` characters of it stand at the end of what was seen so far."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self._back = [0] * (len(text) + 1)
        """For each state the longest shorter one that also stands there (Knuth, Morris and Pratt)."""
        k = 0
        for i in range(1, len(text)):
            while k and text[i] != text[k]:
                k = self._back[k]
            k += text[i] == text[k]
            self._back[i + 1] = k

    @property
    def standing(self) -> int:
        """Characters at the end that a further match could begin with."""
        return self.state if self.state < len(self.text) else self._back[self.state]

    def step(self, char: str) -> bool:
        """Take one character; True when the whole string now stands at the end."""
        state = self.standing
        while state and char != self.text[state]:
            state = self._back[state]
        self.state = state + (char == self.text[state])
        return self.state == len(self.text)


class StopStrings:
    """Passes text on, but holds back what may be the beginning of a stop string. Linear in the text.

    The first string to be complete wins; among those that end at the same character the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """``(text that may be given out, True if a stop string was found)``; nothing may be fed after a find.

        `armed` False: a string that is completed now is ordinary text (``min_tokens`` is not reached yet).
        """
        if not self._held and not any(p.text[0] in text for p in self._patterns):
            return text, False  # nearly every token: no string begins in it
        buffer = self._held + text
        start = len(self._held)
        for position in range(start, len(buffer)):
            found = [p for p in self._patterns if p.step(buffer[position])]
            if found and armed:
                self._held = ""
                longest = max(len(p.text) for p in found)
                return buffer[: position + 1 - longest], True
        cut = len(buffer) - max(p.standing for p in self._patterns)
        self._held = buffer[cut:]
        return buffer[:cut], False

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held
