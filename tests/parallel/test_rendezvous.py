"""The store over TCP: whose socket it is, whose group it belongs to, and what is said when it cannot be used."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from launcher.errors import HostError, UsageError
from launcher.executor.outside import _listen
from launcher.parallel.rendezvous import Rendezvous, open_store, parse

pytestmark = pytest.mark.keeps_descriptors


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("tcp://10.0.0.1:5/3", Rendezvous(host="10.0.0.1", port=5, prefix="3")),
        ("tcp://[fd00::1]:5/3?fd=7", Rendezvous(host="fd00::1", port=5, prefix="3", listening=7)),
        ("tcp://[fe80::1%25Eth0]:5/0", Rendezvous(host="fe80::1%Eth0", port=5, prefix="0")),
        ("tcp://Node-1:5", Rendezvous(host="Node-1", port=5)),
    ],
)
def test_urls(url: str, expected: Rendezvous) -> None:
    assert parse(url) == expected


@pytest.mark.parametrize("url", ["tcp://h:1?fd=x", "tcp://h:1?other=1", "tcp://h:1?fd", "tcp://u@h:1", "tcp://h:99999"])
def test_wrong_urls(url: str) -> None:
    with pytest.raises(UsageError, match="neither"):
        parse(url)


@pytest.fixture(params=["127.0.0.1", "::1"])
def held(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    try:
        made = _listen(request.param)
    except HostError:
        pytest.skip(f"no {request.param} on this machine")
    with made:
        yield made


def test_the_store_listens_on_a_socket_that_we_hold(held: socket.socket) -> None:
    host, port = held.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    # Connections wait in the socket's queue until rank 0 gets to serving.
    early = socket.create_connection(held.getsockname()[:2], timeout=5)
    early.close()
    server = open_store(f"tcp://{host}:{port}/4?fd={held.fileno()}", rank=0, world_size=2, timeout=20)
    client = open_store(f"tcp://{host}:{port}/4", rank=1, world_size=2, timeout=20)
    client.set("key", "value")
    assert server.get("key") == b"value"
    # Who is late, or from another life, finds a store of the same address, and nothing in it.
    late = open_store(f"tcp://{host}:{port}/5", rank=1, world_size=2, timeout=20)
    assert not late.check(["key"])
    del late, client, server
    os.fstat(held.fileno())  # still ours: the store had a duplicate


def test_who_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(HostError, match=rf"tcp://127\.0\.0\.1:{port}/0 cannot be used by rank 3"):
        open_store(f"tcp://127.0.0.1:{port}/0", rank=3, world_size=4, timeout=1)
