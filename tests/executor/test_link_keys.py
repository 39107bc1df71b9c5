"""Whose key opens the data link, and for whom."""

from __future__ import annotations

from launcher.executor.data_link import NodeLink
from launcher.nodes.messages import Hello
from launcher.nodes.secure import Security
from tests.conftest import eventually
from tests.executor.test_links import GENERATION, TOKEN, core, node, welcomed


def test_a_node_cannot_come_in_as_another_one() -> None:
    """The door says whose key it was; what a node says of itself has to fit."""
    key = b"k" * 32
    with core(key, (1, 2)) as link:
        other = NodeLink(link.endpoint, Security(key, 3, 2), Hello(TOKEN, GENERATION, 1))
        try:
            eventually(lambda: (link.read(), link.dropped["the key of another node"] == 1)[1])
            assert not link.nodes
            assert not other.welcome
        finally:
            other._why = "the test is over"
            other.close()
        with node(link, 1, key=key) as true:
            welcomed(link, true)
