"""Every spelling of an address, and every mistake in one."""

from __future__ import annotations

import socket

import pytest

from launcher.errors import UsageError
from launcher.nodes import addresses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("node0:29501", ("node0", 29501)),
        ("node-0.rack_2.example.:65535", ("node-0.rack_2.example.", 65535)),
        ("[fd00::1]:29501", ("fd00::1", 29501)),
        ("[fe80::1%eth0]:5", ("fe80::1%eth0", 5)),
        ("10.0.0.1", ("10.0.0.1", 7)),
        ("node0", ("node0", 7)),
        ("fd00::1", ("fd00::1", 7)),
        ("fd00::1:2950", ("fd00::1:2950", 7)),  # that is an address, not a port
        ("fe80::1%eth0", ("fe80::1%eth0", 7)),
        ("[fd00::1]", ("fd00::1", 7)),
        ("::1", ("::1", 7)),
    ],
)
def test_split(text: str, expected: tuple[str, int]) -> None:
    assert addresses.split_host_port(text, 7) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither an address nor a host's name"),
        ("node0:", "no port"),
        ("node0:x", "no port"),
        ("node0:0", "no port"),
        ("node0:65536", "no port"),
        ("node0:\uff19", "no port"),
        ("[fd00::1", "does not close"),
        ("[fd00::1]29501", "does not close"),
        ("[10.0.0.1]:1", "no IPv6"),
        ("[node0]:1", "no IPv6"),
        ("10.0.0:1", "no IP address"),
        ("10.0.0.256", "no IP address"),
        ("fd00::g", "no IP address"),
        ("fd00::1:29501", "brackets before a port"),
        ("fe80::1%", "no IP address"),
        ("10.0.0.1%eth0", "no IP address"),
        ("fe80::1%a/b", "no IP address"),
        ("a b", "neither an address nor a host's name"),
        ("-x", "neither an address nor a host's name"),
        ("n" * 254, "neither an address nor a host's name"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        addresses.split_host_port(text, 7)


@pytest.mark.parametrize("text", ["node0", "10.0.0.1", "fd00::1", "[fd00::1]"])
def test_a_port_may_be_asked_for(text: str) -> None:
    with pytest.raises(UsageError, match="has no port"):
        addresses.split_host_port(text)


@pytest.mark.parametrize(
    ("literal", "shown", "endpoint", "url"),
    [
        ("10.0.0.1", "10.0.0.1:5", "tcp://10.0.0.1:5", "10.0.0.1"),
        ("fd00::1", "[fd00::1]:5", "tcp://[fd00::1]:5", "[fd00::1]"),
        ("fe80::1%eth0", "[fe80::1%eth0]:5", "tcp://[fe80::1%eth0]:5", "[fe80::1%25eth0]"),
        ("node0", "node0:5", "tcp://node0:5", "node0"),
    ],
)
def test_ways_to_write_it(literal: str, shown: str, endpoint: str, url: str) -> None:
    assert addresses.host_port(literal, 5) == shown
    assert addresses.zmq_endpoint(literal, 5) == endpoint
    assert addresses.url_host(literal) == url
    if literal != "node0":
        assert addresses.split_host_port(shown, 7) == (literal, 5)


def test_questions() -> None:
    assert addresses.is_link_local("fe80::1%eth0")
    assert not addresses.is_link_local("fd00::1")
    assert not addresses.is_link_local("169.254.0.1")
    assert addresses.zone_of("fe80::1%eth0") == "eth0"
    assert addresses.zone_of("fd00::1") == ""
    assert addresses.family_of("fe80::1%eth0") == socket.AF_INET6
    assert addresses.family_of("10.0.0.1") == socket.AF_INET
    assert addresses.same_address("fd00:0::1", "FD00::1")
    assert addresses.same_address("fe80::1%eth0", "fe80::1")
    assert not addresses.same_address("fe80::1%eth0", "fe80::1%eth1")


def test_one_interface_for_all_that_asks_the_environment() -> None:
    env = addresses.interface_environment("eth1", "10.0.0.1")
    assert env == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1", "TP_SOCKET_IFNAME": "eth1"}
    assert addresses.interface_environment("eth1", "fd00::1")["NCCL_SOCKET_FAMILY"] == "AF_INET6"
