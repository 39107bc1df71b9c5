"""Networks to plan for."""

from __future__ import annotations

from typing import Any

from launcher.config import LaunchConfig
from launcher.host.interfaces import Address, Interface, Resolved, Route
from launcher.nodes.addresses import is_literal
from launcher.plan.network import Network

LO = Interface("lo", (Address("127.0.0.1", "127.0.0.0/8"), Address("::1", "::1/128")), loopback=True)
ETH0 = Interface(
    "eth0",
    (Address("10.0.0.1", "10.0.0.0/24"), Address("fd00::1", "fd00::/64"), Address("fe80::1%eth0", "fe80::/64")),
)
ETH1 = Interface("eth1", (Address("10.0.1.1", "10.0.1.0/24"), Address("fe80::1%eth1", "fe80::/64")))
DOWN = Interface("eth2", (Address("10.0.2.1", "10.0.2.0/24"),), up=False)
BARE = Interface("eth3")
EVERY = (LO, ETH0, ETH1, DOWN, BARE)
DEFAULT = Route("eth0", "10.0.0.1")
IPV6_ONLY = Interface("eth0", (Address("fe80::1%eth0", "fe80::/64"), Address("fd00::1", "fd00::/64")))


def network(config: LaunchConfig, **changes: Any) -> Network:
    """Of the host ``node-a``; a literal --master-addr means itself on node 0, as when it was read."""
    known: dict[str, Any] = {"hostname": "node-a.example", "interfaces": EVERY, "default": DEFAULT}
    given = config.master_addr
    if given is not None and config.node_rank == 0 and is_literal(given):
        known["master"] = Resolved((given,))
    return Network(**known | changes)
