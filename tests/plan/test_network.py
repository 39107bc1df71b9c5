"""Which address a node has, and every way in which what was given cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config import LaunchConfig
from launcher.errors import HostError, UsageError, XserveError
from launcher.host.interfaces import Resolved, Route
from launcher.plan.network import Network, choose_address, read_network
from tests.plan.made_networks import DEFAULT, DOWN, ETH1, IPV6_ONLY, LO, network


def zero(**fields: Any) -> LaunchConfig:
    return LaunchConfig(tp=2, nnodes=2, **fields)


def one(**fields: Any) -> LaunchConfig:
    return LaunchConfig(tp=2, nnodes=2, node_rank=1, **fields)


@pytest.mark.parametrize(
    ("config", "changes", "address", "iface", "net"),
    [
        (zero(), {}, "10.0.0.1", "eth0", "10.0.0.0/24"),
        (zero(iface="eth1"), {}, "10.0.1.1", "eth1", "10.0.1.0/24"),
        (zero(iface="lo"), {}, "127.0.0.1", "lo", "127.0.0.0/8"),
        (zero(master_addr="10.0.1.1"), {}, "10.0.1.1", "eth1", "10.0.1.0/24"),
        (zero(master_addr="FD00:0::1"), {}, "fd00::1", "eth0", "fd00::/64"),
        (zero(master_addr="127.0.0.1"), {}, "127.0.0.1", "lo", "127.0.0.0/8"),
        (zero(master_addr="fe80::1%eth1"), {}, "fe80::1%eth1", "eth1", "fe80::/64"),
        (zero(master_addr="fe80::1", iface="eth1"), {}, "fe80::1%eth1", "eth1", "fe80::/64"),
        # no default route: the first that is up and not loopback
        (zero(), {"default": None, "interfaces": (LO, DOWN, ETH1)}, "10.0.1.1", "eth1", "10.0.1.0/24"),
        (zero(), {"default": None, "interfaces": (LO, DOWN)}, "10.0.2.1", "eth2", "10.0.2.0/24"),
        # nothing but IPv6
        (zero(), {"default": Route("eth0", "fd00::1"), "interfaces": (LO, IPV6_ONLY)}, "fd00::1", "eth0", "fd00::/64"),
        (zero(), {"default": None, "interfaces": (LO, IPV6_ONLY)}, "fd00::1", "eth0", "fd00::/64"),
        # names
        (zero(master_addr="a"), {"master": Resolved(("10.0.1.1",))}, "10.0.1.1", "eth1", "10.0.1.0/24"),
        (zero(master_addr="a"), {"master": Resolved(("10.9.9.9", "fd00::1"))}, "fd00::1", "eth0", "fd00::/64"),
        (zero(master_addr="node-a"), {"master": Resolved(("127.0.1.1",))}, "10.0.0.1", "eth0", "10.0.0.0/24"),
        (zero(master_addr="NODE-A.example"), {"master": Resolved(fault="?")}, "10.0.0.1", "eth0", "10.0.0.0/24"),
        (zero(master_addr="node-a"), {"master": Resolved(("10.0.1.1",))}, "10.0.1.1", "eth1", "10.0.1.0/24"),
    ],
)
def test_node_0(config: LaunchConfig, changes: dict[str, Any], address: str, iface: str, net: str) -> None:
    at = choose_address(config, network(config, **changes))
    assert (at.master, at.address, at.iface, at.network) == (address, address, iface, net)


@pytest.mark.parametrize(
    ("config", "changes", "master", "address", "iface"),
    [
        (one(master_addr="10.0.0.9"), {}, "10.0.0.9", "", ""),
        (one(master_addr="a"), {}, "a", "", ""),
        (one(master_addr="10.0.0.9"), {"to_master": DEFAULT}, "10.0.0.9", "", ""),
        (one(master_addr="10.0.0.9", iface="eth1"), {}, "10.0.0.9", "10.0.1.1", "eth1"),
        (one(master_addr="fd00::9", iface="eth0"), {}, "fd00::9", "fd00::1", "eth0"),
        (one(master_addr="fe80::9%eth1"), {}, "fe80::9%eth1", "", ""),
        (one(master_addr="fe80::9", iface="eth1"), {}, "fe80::9%eth1", "fe80::1%eth1", "eth1"),
        (one(master_addr="a", iface="eth1"), {}, "a", "", "eth1"),
    ],
)
def test_the_others(config: LaunchConfig, changes: dict[str, Any], master: str, address: str, iface: str) -> None:
    at = choose_address(config, network(config, **changes))
    assert (at.master, at.address, at.iface) == (master, address, iface)


def test_the_net_that_leads_to_the_master() -> None:
    config = one(master_addr="10.0.0.9")
    assert choose_address(config, network(config, to_master=DEFAULT)).network == "10.0.0.0/24"


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (zero(iface="eth7"), {}, ["--iface eth7", "lo, eth0, eth1, eth2, eth3"]),
        (zero(iface="eth3"), {}, ["--iface eth3 has no address", "lo, eth0, eth1, eth2"]),
        (one(master_addr="10.0.0.9", iface="eth7"), {}, ["--iface eth7", "eth0"]),
        (zero(master_addr="10.0.0.9"), {}, ["--master-addr 10.0.0.9 is no address of this host", "10.0.0.1 (eth0)"]),
        (zero(master_addr="10.0.0.9"), {}, ["fe80::1%eth0 (eth0)", "127.0.0.1 (lo)"]),
        (zero(master_addr="a"), {"master": Resolved(("10.9.9.9",))}, ["--master-addr a (10.9.9.9)", "10.0.0.1 (eth0)"]),
        (
            zero(master_addr="a"),
            {"master": Resolved(fault="Name not known")},
            ["--master-addr a: Name not known", "eth0"],
        ),
        (zero(master_addr="10.0.0.1", iface="eth1"), {}, ["is on eth0, not on --iface eth1 (10.0.1.1,"]),
        (zero(master_addr="fe80::1"), {}, ["several interfaces", "fe80::1%eth0, fe80::1%eth1"]),
        (zero(master_addr="fe80::1%eth7"), {}, ["no address of this host"]),
        (one(), {}, ["--node-rank 1 needs --master-addr: node 0 prints it"]),
        (one(master_addr="fe80::9"), {}, ["link-local", "write fe80::9%eth0, or give --iface"]),
        (one(master_addr="fe80::9%eth7"), {}, ["no interface eth7", "lo, eth0"]),
        (one(master_addr="fe80::9%eth0", iface="eth1"), {}, ["behind eth0, not --iface eth1"]),
        (one(master_addr="fd00::9", iface="eth2"), {}, ["--iface eth2 has no IPv6 address"]),
        (zero(), {"default": None, "interfaces": (LO,)}, ["no address but loopback"]),
        (zero(), {"default": None, "interfaces": ()}, ["no address but loopback"]),
    ],
)
def test_refusals(config: LaunchConfig, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(XserveError) as error:
        choose_address(config, network(config, **changes))
    assert isinstance(error.value, UsageError | HostError)
    line = str(error.value)
    assert all(word in line for word in words), line
    assert "\n" not in line


def test_an_interface_that_is_down_is_said() -> None:
    config = zero(iface="eth2")
    assert choose_address(config, network(config)).notes == (
        "--iface eth2 is down: no other node can be reached by it",
    )


def test_reading_asks_nobody_for_a_literal(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object) -> Resolved:
        raise AssertionError("asked")

    monkeypatch.setattr("launcher.plan.network.resolve", nobody)
    found = read_network(zero(master_addr="127.0.0.1"), "m")
    assert found.master == Resolved(("127.0.0.1",))
    assert choose_address(zero(master_addr="127.0.0.1"), found).iface == "lo"
    assert read_network(one(master_addr="name-of-node-0"), "m").to_master is None
    assert read_network(one(master_addr="127.0.0.1"), "m").to_master == Route("lo", "127.0.0.1")
    assert isinstance(read_network(zero(), "m"), Network)
