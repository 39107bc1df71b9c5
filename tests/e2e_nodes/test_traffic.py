"""What crosses the network: each plan once per node, however many workers there are."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e_nodes.conftest import MakeNet, Start
from tests.e2e_nodes.hosts import exit_codes, keygen

TOKENS = 100_000
PLAN = 4 * TOKENS
"""Bytes of a plan with a new request: its prompt as int32."""


@pytest.mark.parametrize(("nodes", "tp"), [(2, 2), (2, 8), (3, 6)], ids=["1-worker", "4-workers", "3-nodes"])
@pytest.mark.parametrize("key", [False, True], ids=["no-key", "key"])
def test_a_plan_crosses_once_per_node(
    make_net: MakeNet, start: Start, nodes: int, tp: int, key: bool, tmp_path: Path
) -> None:
    net = make_net(nodes)
    flags = ("--worker", "reference", "--tp", str(tp), "--nnodes", str(nodes), "--master-addr", net.ipv4(0))
    flags = (*flags, "--worker-config", f"max_model_len={TOKENS + 100}", "--max-num-batched-tokens", str(TOKENS + 100))
    if key:
        flags = (*flags, "--cluster-key-file", str(keygen(tmp_path / "key")))
    hosts = [start(net, node, *flags, "--node-rank", str(node)) for node in range(nodes)]
    for host in hosts:
        host.wait_node()
    assert hosts[0].is_right("x" * TOKENS, 1)  # the first one of all may cost more
    rounds = 5
    before = net.sent(0)
    for number in range(rounds):
        assert hosts[0].is_right(f"{number}" * TOKENS, 1)
    # Heartbeats and acknowledgements are in it: some hundred bytes a second, of 400 kB a plan.
    each = (net.sent(0) - before) / rounds / (nodes - 1)
    assert 1.0 <= each / PLAN <= 1.1, each / PLAN
    hosts[0].signal(signal.SIGTERM)
    assert exit_codes(hosts) == [0] * nodes
