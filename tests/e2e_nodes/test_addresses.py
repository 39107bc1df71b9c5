"""Interfaces and address families: the one that routes to the master, IPv6 in every spelling, unknown names."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

import pytest
from _testnet import Testnet

from tests.e2e_nodes.conftest import MakeNet, Start
from tests.e2e_nodes.hosts import Host, exit_codes, listeners

REFERENCE = ("--worker", "reference", "--tp", "4", "--nnodes", "2")


def pair(
    net: Testnet, start: Start, addresses: Sequence[str], flags: Sequence[str] = (), option: str = "--master-addr"
) -> tuple[Host, Host]:
    """Both nodes; `addresses`: node 0's, as each of them is given it."""
    zero, one = (
        start(net, node, *REFERENCE, "--node-rank", str(node), option, addresses[node], *flags) for node in (0, 1)
    )
    return zero, one


def serves(zero: Host, one: Host) -> None:
    zero.wait_node()
    one.wait_node()
    assert zero.is_right("addresses", 7)


def ends(zero: Host, one: Host) -> None:
    zero.signal(signal.SIGTERM)
    assert exit_codes((zero, one)) == [0, 0], f"{zero.output}\n{one.output}"


def test_several_interfaces_and_a_host_name_that_nobody_knows(make_net: MakeNet, start: Start) -> None:
    """The way to the master is by eth1: that is taken, said, and used for all that listens."""
    net = make_net(2, second=True)
    zero, one = pair(net, start, [net.ipv4(0, "eth1")] * 2)
    serves(zero, one)
    for node, host in enumerate((zero, one)):
        host.wait_line(
            rf"\beth1\b.*{re.escape(net.ipv4(node, 'eth1'))}|{re.escape(net.ipv4(node, 'eth1'))}.*\beth1\b", 2
        )
        heard = {address for address, _ in listeners(net, node) if not address.startswith("127.")}
        assert heard <= {net.ipv4(node, "eth1")}, heard
    assert net.sent(0, "eth0") < 2000  # neighbour discovery and such
    ends(zero, one)


def test_an_interface_by_name(make_net: MakeNet, start: Start) -> None:
    net = make_net(2, second=True)
    zero, one = pair(net, start, [net.ipv4(0, "eth1")] * 2, ["--iface", "eth1"])
    serves(zero, one)
    ends(zero, one)


def test_the_wrong_interface(make_net: MakeNet, start: Start) -> None:
    """Node 0 refuses an address that is not on the interface; node 1 says that from there nobody is reached."""
    net = make_net(2, second=True)
    zero = start(net, 0, *REFERENCE, "--node-rank", "0", "--master-addr", net.ipv4(0), "--iface", "eth1")
    assert zero.wait_exit(6) == 2, zero.output
    assert "--iface eth1" in zero.output
    assert net.ipv4(0, "eth1") in zero.output
    net.ip(1, "route", "del", "10.77.0.0/24", "dev", "eth0")
    one = start(net, 1, *REFERENCE, "--node-rank", "1", "--master-addr", net.ipv4(0), "--iface", "eth1")
    one.wait_line(rf"{re.escape(net.ipv4(0))}.*(no route|unreachable|no answer)", 15)


@pytest.mark.parametrize("case", ["bare", "brackets", "link-local"])
def test_nothing_but_ipv6(make_net: MakeNet, start: Start, case: str) -> None:
    net = make_net(2, ipv4=False, ipv6=True)
    option, flags = "--master-addr", ["--host", "::"]
    address = net.ipv6(0)
    if case == "brackets":
        option, address = "--dist-init-addr", f"[{net.ipv6(0)}]:29700"
    elif case == "link-local":
        address = f"{net.link_local(0)}%eth0"
    zero, one = pair(net, start, [address] * 2, flags, option)
    serves(zero, one)
    port = 29700 if case == "brackets" else 29501
    assert any(where[1] == port for where in listeners(net, 0)), listeners(net, 0)
    ends(zero, one)


def test_both_families(make_net: MakeNet, start: Start) -> None:
    net = make_net(2, ipv6=True)
    zero, one = pair(net, start, [net.ipv6(0)] * 2)
    serves(zero, one)
    ends(zero, one)


def test_one_node_needs_no_network(make_net: MakeNet, start: Start) -> None:
    """Nothing but lo, and even that is down: HTTP over a Unix socket is all that is left."""
    net = make_net(1)
    net.ip(0, "link", "del", "eth0")
    host = start(net, 0, "--worker", "reference", "--tp", "2")
    host.wait_ready()
    assert host.is_right()
    assert {address for address, _ in listeners(net, 0)} == {"127.0.0.1"}
    assert host.stop() == 0
    net.ip(0, "link", "set", "lo", "down")
    path = host.runtime / "http"
    dark = start(net, 0, "--worker", "reference", "--tp", "2", "--uds", str(path))
    dark.wait_line("ready: ", 20)
    assert listeners(net, 0) == []
    assert dark.stop() == 0


def test_one_node_listens_beyond_loopback_with_http_only(make_net: MakeNet, start: Start) -> None:
    net = make_net(1, ipv6=True)
    host = start(net, 0, "--worker", "reference", "--tp", "2", "--host", "0.0.0.0")
    host.wait_ready()
    assert host.is_right()
    beyond = [(a, p) for a, p in listeners(net, 0) if not a.startswith("127.") and a != "::1"]
    assert beyond == [("0.0.0.0", host.port)]
    assert host.stop() == 0
