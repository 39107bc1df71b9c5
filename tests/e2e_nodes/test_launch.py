"""The same command on each node, and one launch comes of it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest
from _testnet import Testnet

from tests.conftest import eventually
from tests.e2e_nodes.conftest import MakeNet, Start
from tests.e2e_nodes.hosts import Host, exit_codes, json_of

REFERENCE = ("--worker", "reference")


def workers(*ranks: int) -> set[str]:
    return {f"Worker_DP0_PP0_TP{rank}" for rank in ranks}


@pytest.mark.parametrize("first", [0, 1], ids=["node0-first", "node1-first"])
def test_the_command_of_the_title(net: Testnet, start: Start, first: int) -> None:
    flags = ("--tp", "8", "--nnodes", "2", *REFERENCE)
    of_node = {0: ("--node-rank", "0"), 1: ("--node-rank", "1", "--master-addr", net.ipv4(0))}
    hosts: dict[int, Host] = {}
    for node in (first, 1 - first):
        hosts[node] = start(net, node, *flags, *of_node[node])
        if node == first:  # the other one comes when this one waits for it
            hosts[node].wait_line("waiting for node 1" if node == 0 else "node 0", 15)
    zero, one = hosts[0], hosts[1]
    zero.wait_node()
    one.wait_node()
    assert zero.is_right("hello", 12)
    agents = {"Forkserver", "NodeAgent_N0", "APIServer_0", "EngineCore_DP0"}
    assert zero.titles == agents | workers(0, 1, 2, 3)
    assert one.titles == {"Forkserver", "NodeAgent_N1"} | workers(4, 5, 6, 7)
    assert zero.pid_of("Worker_DP0_PP0_TP0") in {p["pid"] for p in json_of(zero)["processes"]}
    zero.signal(signal.SIGTERM)
    assert exit_codes((zero, one)) == [0, 0], f"{zero.output}\n{one.output}"
    zero.assert_nothing_left()
    one.assert_nothing_left()


def test_three_nodes(make_net: MakeNet, start: Start) -> None:
    net = make_net(3)
    flags = ("--tp", "6", "-n", "3", "--dist-init-addr", f"{net.ipv4(0)}:29600", *REFERENCE)
    hosts = [start(net, node, *flags, "-r", str(node)) for node in (2, 1, 0)][::-1]
    for host in hosts:
        host.wait_node()
    assert hosts[0].is_right()
    assert [workers(2 * n, 2 * n + 1) <= host.titles for n, host in enumerate(hosts)] == [True] * 3
    hosts[0].signal(signal.SIGTERM)
    assert exit_codes(hosts) == [0, 0, 0]
    for host in hosts:
        host.assert_nothing_left()


def test_a_node_that_is_stopped_by_its_operator(net: Testnet, start: Start) -> None:
    flags = ("--tp", "2", "--nnodes", "2", "--master-addr", net.ipv4(0), "--restart", "never", *REFERENCE)
    zero, one = (start(net, node, *flags, "--node-rank", str(node)) for node in (0, 1))
    zero.wait_node()
    one.wait_node()
    assert one.stop() == 0, one.output
    assert zero.wait_exit(15) == 69, zero.output
    assert "node 1" in zero.output
    for host in (zero, one):
        host.assert_nothing_left()


PROMPTS = [
    ("Hi!", 40),
    ("What is the capital of France?", 24),
    ("The river is wide here and the ferry is late. " * 5, 32),
    ("Größe, naïve, 東京: translate.", 29),
]


def answered(url: str, model: str) -> list[list[bytes]]:
    """Greedy tokens, as their bytes, of all prompts, asked at once."""

    async def ask(http: httpx.AsyncClient, prompt: str, tokens: int) -> list[bytes]:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "logprobs": True}
        reply = await http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return [bytes(token["bytes"]) for token in reply.json()["choices"][0]["logprobs"]["content"]]

    async def ask_all() -> list[list[bytes]]:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            return await asyncio.gather(*(ask(http, *prompt) for prompt in PROMPTS))

    return asyncio.run(ask_all())


@pytest.mark.parametrize("tp", [4])
def test_tokens_of_a_model_over_two_nodes_are_those_of_one(
    net: Testnet, start: Start, tiny_llama: Path, tp: int
) -> None:
    model = ("--model", str(tiny_llama), "--dtype", "float32", "--device", "cpu")
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    alone = start(net, 1, *model, "--backend", "uni", "--name", "alone", env=env)
    flags = (*model, "--tp", str(tp), "--nnodes", "2", "--master-addr", net.ipv4(0))
    zero, one = (start(net, node, *flags, "--node-rank", str(node), env=env) for node in (0, 1))
    alone.wait_ready(90)
    with net.inside(1):
        wanted = answered("http://127.0.0.1:8000", tiny_llama.name)
    zero.wait_node(90)
    one.wait_node(10)
    with net.inside(0):
        got = answered("http://127.0.0.1:8000", tiny_llama.name)
    assert got == wanted
    assert len({len(tokens) for tokens in got}) > 2  # they did not all end at once
    eventually(lambda: workers(2, 3) <= one.titles, 5)
    alone.signal(signal.SIGTERM)
    zero.signal(signal.SIGTERM)
    assert exit_codes((zero, one, alone)) == [0, 0, 0]
