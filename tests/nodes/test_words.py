"""Texts of other nodes on our screen."""

from __future__ import annotations

from launcher.errors import Failure
from launcher.nodes.words import clean

ESCAPE = "\x1b]0;pwned\x07\x1b[2J\r"


def test_a_failure_of_another_node_cannot_move_the_cursor() -> None:
    failure = Failure(
        title=f"Worker{ESCAPE}",
        role="worker",
        kind="raised",
        headline=f"ValueError: {ESCAPE}{'x' * 1000}",
        step=ESCAPE,
        host=ESCAPE,
        traceback=f"Traceback\n\t{ESCAPE}\n",
        last_output=(ESCAPE,),
        rank=3,
    )
    shown = clean(failure)
    texts = (shown.title, shown.headline, shown.step, shown.host, shown.traceback, *shown.last_output)
    assert not {character for text in texts for character in text if ord(character) < 32} - {"\n", "\t"}
    assert len(shown.headline) == len(failure.headline), "nothing of a long headline is cut off"
    assert shown.traceback.count("\n") == 2
    assert shown.rank == 3
