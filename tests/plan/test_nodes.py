"""Whole plans over several nodes: each node starts its own ranks, and all agree on what must be equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher.config import AgentSettings, EngineSettings, LaunchConfig, NodeSettings, WorkerSettings
from launcher.errors import HostError, UsageError
from launcher.host import HostFacts
from launcher.host.interfaces import Route
from launcher.plan import Files, LaunchPlan, Place, decide, front, make_plan, settings_of
from launcher.plan.agreement import agreement, read_model_digest, read_torch_version
from launcher.plan.budget import memory_need
from launcher.plan.checkpoint import read_checkpoint
from launcher.plan.node_words import node_notes
from launcher.plan.processes import of_generation
from launcher.plan.resolved import Resolved
from launcher.plan.show import HIDDEN, rows, to_json
from tests.plan.made_facts import GIB, gpu_machine, machine
from tests.plan.made_networks import IPV6_ONLY, LO, network
from tests.plan.model_files import write_model

PLACE = Place(Path("/run/x"), "L1", "default")


def plan(config: LaunchConfig, facts: HostFacts | None = None, **files: Any) -> LaunchPlan:
    files.setdefault("network", network(config))
    return decide(config, facts or machine(), PLACE, Files(**files))


def config(rank: int = 0, **fields: Any) -> LaunchConfig:
    given = {"master_addr": "10.0.0.1"} if rank else {}
    return LaunchConfig(**{"tp": 8, "nnodes": 2, "node_rank": rank, **given, **fields})


def agent(made: LaunchPlan) -> AgentSettings:
    found = settings_of(next(spec for spec in made.processes if spec.role == "node_agent"))
    assert isinstance(found, AgentSettings)
    return found


def workers(made: LaunchPlan) -> list[WorkerSettings]:
    specs = [child for spec in made.processes for child in spec.children]
    return [msgspec.msgpack.decode(child.payload, type=WorkerSettings) for child in specs]


# --- the process table ---------------------------------------------------------------------------------------------


def test_node_0() -> None:
    made = plan(config())
    api, node, core = made.processes
    assert (api.role, node.title, node.comm, core.title) == (
        "api_server",
        "NodeAgent_N0",
        "xs:agent.n0",
        "EngineCore_DP0",
    )
    assert node.target == "launcher.executor.node_agent:run"
    assert not node.children, "the workers are the engine core's"
    assert [made.method_of(spec) for spec in made.processes] == ["spawn", "spawn", "forkserver"]
    assert [child.title for child in core.children] == [f"Worker_DP0_PP0_TP{rank}" for rank in range(4)]
    settings = settings_of(core)
    assert isinstance(settings, EngineSettings)
    assert settings.backend == "mp-nodes"
    assert settings.nodes == agent(made).nodes
    assert settings.worker == workers(made)[0]
    assert made.http is not None
    assert made.serves == ""
    assert made.world_size == 8


def test_node_1() -> None:
    made = plan(config(1))
    (node,) = made.processes
    assert (node.title, node.comm, node.role, node.child_method) == (
        "NodeAgent_N1",
        "xs:agent.n1",
        "node_agent",
        "fork",
    )
    assert made.method_of(node) == "forkserver"
    assert [child.title for child in node.children] == [f"Worker_DP0_PP0_TP{rank}" for rank in range(4, 8)]
    assert [child.rank for child in node.children] == [4, 5, 6, 7]
    assert {spec.node for spec in (node, *node.children)} == {1}
    assert (made.http, made.url, made.serves) == (None, "", "ranks 4-7 of 8 serve node 0 at 10.0.0.1:29501")
    assert made.helper is not None
    assert "launcher.executor.node_agent" in made.helper.preload
    assert "launcher.engine.core_process" not in made.helper.preload
    assert len({spec.comm for spec in (node, *node.children)}) == 5


@pytest.mark.parametrize(("nnodes", "tp"), [(2, 2), (2, 8), (3, 6), (4, 4), (8, 64)])
def test_every_rank_is_on_one_node(nnodes: int, tp: int) -> None:
    every = [each for rank in range(nnodes) for each in workers(plan(config(rank, nnodes=nnodes, tp=tp)))]
    assert [each.ranks.rank for each in every] == list(range(tp))
    assert [each.ranks.tp_rank for each in every] == list(range(tp))
    local = tp // nnodes
    assert [each.ranks.local_rank for each in every] == [rank % local for rank in range(tp)]
    assert {(e.ranks.world_size, e.ranks.tp_size, e.local_world_size) for e in every} == {(tp, tp, local)}
    assert {(e.awaits_group, e.rendezvous) for e in every} == {(True, "")}


def test_the_last_rank_alone_is_one_rank() -> None:
    assert plan(config(1, tp=2)).serves == "rank 1 of 2 serves node 0 at 10.0.0.1:29501"


def test_spawn() -> None:
    (node,) = plan(config(1, start_method="spawn")).processes
    assert node.child_method == "spawn"


def test_each_life_knows_its_number() -> None:
    for rank in (0, 1):
        for spec in plan(config(rank)).processes:
            if spec.role == "api_server":
                continue
            later = of_generation(spec, 3)
            settings = settings_of(later)
            assert isinstance(settings, AgentSettings | EngineSettings)
            assert settings.generation == 3
            for child in later.children:
                worker = msgspec.msgpack.decode(child.payload, type=WorkerSettings)
                assert (worker.generation, worker.rendezvous, worker.awaits_group) == (3, "", True)


def test_one_node_is_as_before() -> None:
    made = make_plan(LaunchConfig(tp=2), machine(), run_dir=Path("/run/x"), launch_id="L1", name="default")
    assert [spec.role for spec in made.processes] == ["api_server", "engine_core"]
    settings = settings_of(made.processes[1])
    assert isinstance(settings, EngineSettings)
    assert (settings.backend, settings.nodes) == ("mp", None)
    assert [(w.awaits_group, w.local_world_size, w.rendezvous[:8]) for w in workers(made)] == [
        (False, 2, "file:///")
    ] * 2
    assert made.processes[1].env["GLOO_SOCKET_IFNAME"] == "lo"
    assert made.processes[1].env["NCCL_SOCKET_IFNAME"] == "=lo"
    assert [row.name for row in made.ports] == ["HTTP"]
    assert made.firewall is None


def test_one_node_reads_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("launcher.plan.plan.read_network", nobody)
    make_plan(LaunchConfig(tp=2, master_addr="x"), machine(), run_dir=Path("/run/x"), launch_id="L1", name="default")


# --- this machine's share ------------------------------------------------------------------------------------------


def test_devices_and_threads_are_for_the_ranks_here(tmp_path: Path) -> None:
    model = write_model(tmp_path, num_attention_heads=8, num_key_value_heads=8)
    given = {"model": model, "checkpoint": read_checkpoint(model)}
    made = plan(config(1, model=str(model)), gpu_machine(4), **given)
    assert [each.device_index for each in workers(made)] == [0, 1, 2, 3]
    assert made.threads == 4
    with pytest.raises(UsageError, match=r"4 ranks a node \(--tp 8 over --nnodes 2\) are more than the 3 visible GPUs"):
        plan(config(1, model=str(model)), gpu_machine(3), **given)
    with pytest.raises(UsageError, match="--device-ids 0,1 names 2 devices, but --tp 8 over --nnodes 2 needs 4"):
        plan(
            config(1, model=str(model), device_ids=("0", "1")),
            gpu_machine(4, gpu_entries=("0", "1", "2", "3")),
            **given,
        )


def test_memory_is_for_the_ranks_here(tmp_path: Path) -> None:
    model = read_checkpoint(write_model(tmp_path))
    here = memory_need(model, "float32", 2, 1 << 20, 64, local_workers=1)
    everywhere = memory_need(model, "float32", 2, 1 << 20, 64)
    assert (here.weights, here.kv) == (everywhere.weights // 2, everywhere.kv // 2)
    assert "1 of 2 ranks" in here.line
    given = {"model": tmp_path, "checkpoint": model}
    one = config(1, model=str(tmp_path), tp=2, kv_cache_memory=GIB)
    plan(one, machine(memory_free=GIB + here.weights), **given)
    with pytest.raises(HostError, match="not enough memory"):
        plan(one, machine(memory_free=GIB), **given)


def test_numa_lists_are_for_the_ranks_here() -> None:
    cpus = ((0,), (1,), (2,), (3,))
    made = plan(config(1, numa_bind_cpus=cpus), machine(cpu_ids=tuple(range(16))))
    assert [child.cpus for child in made.processes[0].children] == list(cpus)


# --- what the agent is told ----------------------------------------------------------------------------------------


def test_what_the_agents_are_told() -> None:
    zero = agent(plan(config(cluster_key_file="k", join_timeout=20.0), cluster_key=b"k" * 32))
    assert zero.world_size == 8
    assert zero.nodes == NodeSettings(
        nnodes=2,
        node_rank=0,
        ranks_per_node=4,
        master_addr="10.0.0.1",
        iface="eth0",
        address="10.0.0.1",
        local_endpoint="ipc:///run/x/agent.sock",
        join_timeout=20.0,
        key=b"k" * 32,
        agreement=zero.nodes.agreement,
        owner="L1",
    )
    one = agent(plan(config(1))).nodes
    assert (one.master_addr, one.iface, one.address, one.local_endpoint) == ("10.0.0.1", "", "", "")


@pytest.mark.parametrize(
    ("fields", "restart"),
    [({}, True), ({"restart": "always"}, True), ({"restart": "never"}, False), ({"max_restarts": 0}, False)],
)
def test_whether_a_lost_node_is_waited_for(fields: dict[str, Any], restart: bool) -> None:
    assert agent(plan(config(**fields))).nodes.restart is restart


def test_a_run_directory_that_is_too_long() -> None:
    with pytest.raises(HostError, match=r"run directory /r+ is too long: agent\.sock"):
        front.agent_address(Path("/" + "r" * 100))


def test_one_interface_for_gloo_and_nccl() -> None:
    _, node, core = plan(config()).processes
    assert core.env["GLOO_SOCKET_IFNAME"] == core.children[0].env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert core.env["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert "GLOO_SOCKET_IFNAME" not in node.env
    (follower,) = plan(config(1)).processes
    assert not [name for name in follower.env if name.endswith("SOCKET_IFNAME")], "not known yet"
    (follower,) = plan(config(1, iface="eth1")).processes
    assert follower.children[0].env["TP_SOCKET_IFNAME"] == "eth1"
    _, _, core = plan(config(env={"NCCL_SOCKET_IFNAME": "ib0"})).processes
    assert core.env["NCCL_SOCKET_IFNAME"] == "ib0", "--env wins"


# --- agreement -----------------------------------------------------------------------------------------------------


def agreed(config: LaunchConfig, facts: HostFacts | None = None, **files: Any) -> dict[str, str]:
    read = Files(network=network(config), **files)
    return agreement(config, read, Resolved(config, facts or machine(), read))


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "0.0.0.0", "port": 1, "uds": "/x", "api_key": "k"},
        {"name": "other", "served_model_name": "m", "log_level": "debug"},
        {"numa_bind_cpus": ((0,),), "iface": "eth1", "join_timeout": 1.0, "cluster_key_file": "/k"},
        {"restart": "always", "max_restarts": 9, "restart_backoff": 0.0},
        {"ready_timeout": 1.0, "shutdown_timeout": 1.0, "watchdog_timeout": 0.0, "ring_bytes": 1 << 20},
        {"start_method": "spawn", "env": {"A": "b"}, "backend": "mp"},
    ],
)
def test_what_each_node_has_for_itself(fields: dict[str, Any]) -> None:
    facts = machine(cpu_ids=tuple(range(16)))
    assert agreed(config(1, **fields), facts) == agreed(config(), facts)


@pytest.mark.parametrize(
    ("fields", "option", "value"),
    [
        ({"tp": 16}, "--tp", "16"),
        ({"tp": 9, "nnodes": 3}, "--nnodes", "3"),
        ({"max_model_len": 256}, "--max-model-len", "256"),
        ({"max_num_seqs": 3}, "--max-num-seqs", "3"),
        ({"max_num_batched_tokens": 99}, "--max-num-batched-tokens", "99"),
        ({"kv_cache_memory": 1 << 20}, "--kv-cache-memory", "1048576"),
        ({"gpu_memory_utilization": 0.5}, "--gpu-memory-utilization", "0.5"),
        ({"seed": 7}, "--seed", "7"),
        ({"dtype": "float16"}, "--dtype", "float16"),
        ({"worker": "json:JSONDecoder"}, "--worker", "json:JSONDecoder"),
        ({"worker_extension": "json:JSONEncoder"}, "--worker-extension", "json:JSONEncoder"),
        ({"worker_config": {"b": "2", "a": "1"}}, "--worker-config", "a=1,b=2"),
        ({"restart": "never"}, "--restart", "never"),
        ({"max_restarts": 0}, "--restart", "never"),
    ],
)
def test_what_must_be_equal(fields: dict[str, Any], option: str, value: str) -> None:
    ours, theirs = agreed(config()), agreed(config(1, **fields))
    assert theirs[option] == value != ours[option]
    same = ours.keys() & theirs.keys() - {option}
    assert {ours[name] == theirs[name] for name in same if name not in ("--tp", "--nnodes")} == {True}


def test_secrets_of_a_worker_do_not_travel() -> None:
    shown = agreed(config(worker_config={"hf_token": "hunter2", "a": "1"}))["--worker-config"]
    assert "hunter2" not in shown
    assert "a=1" in shown
    assert shown != agreed(config(worker_config={"hf_token": "other", "a": "1"}))["--worker-config"]


def test_the_same_model_elsewhere_is_the_same(tmp_path: Path) -> None:
    here, there = write_model(tmp_path / "a"), write_model(tmp_path / "b" / "c")
    assert read_model_digest(here) == read_model_digest(there)
    with (there / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert read_model_digest(here) != read_model_digest(there)
    other = write_model(tmp_path / "d", num_hidden_layers=9)
    assert read_model_digest(here) != read_model_digest(other)
    assert read_model_digest(tmp_path)  # a worker of its own may need no config.json


def test_torch_counts_where_it_is_wanted() -> None:
    assert read_torch_version("launcher.worker.reference:ReferenceWorker") == ""
    assert read_torch_version("launcher.models.worker:TransformersWorker").count(".") == 1
    assert agreed(config(), torch_version="2.9")["torch"] == "2.9"


def test_several_workers_on_a_device(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    files = {"model": model, "checkpoint": read_checkpoint(model)}
    shared = config(tp=4, model=str(model), device_ids=("0", "0"))
    apart = config(tp=4, model=str(model), device_ids=("0", "1"))
    ours, theirs = (agreed(each, gpu_machine(2, gpu_entries=("0", "1")), **files) for each in (shared, apart))
    assert ours["--device-ids"] != theirs["--device-ids"]


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"node_rank": 5}, "--node-rank 5: --nnodes 2 has ranks 0 and 1"),
        ({"node_rank": 4, "nnodes": 4}, "--node-rank 4: --nnodes 4 has ranks 0 to 3"),
        ({"node_rank": 1, "nnodes": 1}, "--node-rank 1: --nnodes 1 has rank 0 only"),
        ({"node_rank": -1}, "--node-rank -1"),
        ({"nnodes": 0}, "--nnodes 0: must be 1 or more"),
        ({"tp": 5}, "--tp 5 cannot be spread over --nnodes 2, as many ranks on each: use --tp 4 or 6"),
        ({"tp": 1}, "--tp 1 cannot be spread over --nnodes 2, as many ranks on each: use --tp 2"),
        ({"backend": "uni"}, "--backend uni runs on one machine, not on --nnodes 2: use --backend mp"),
        ({"backend": "my:Own"}, "--backend my:Own runs on one machine"),
        ({"master_port": 0}, "--master-port 0"),
        ({"join_timeout": 0.0}, "--join-timeout 0.0"),
    ],
)
def test_numbers_that_cannot_be(fields: dict[str, Any], words: str) -> None:
    made = LaunchConfig(**{"tp": 8, "nnodes": 2, "master_addr": "127.0.0.1", **fields})
    with pytest.raises(UsageError) as error:
        make_plan(made, machine(), run_dir=Path("/run/x"), launch_id="L1", name="default")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1"])
def test_http_at_the_master_port(host: str) -> None:
    at = {"master_addr": "127.0.0.1", "host": host, "port": 29501}
    with pytest.raises(UsageError, match="--port 29501 is the --master-port too"):
        make_plan(config(**at), machine(), run_dir=Path("/run/x"), launch_id="L1", name="default")
    apart = config(**at | {"master_port": 29502})
    make_plan(apart, machine(), run_dir=Path("/run/x"), launch_id="L1", name="default")


def test_http_at_the_master_port_of_another_address() -> None:
    made = config(master_addr="127.0.0.1", host="127.0.0.2", port=29501)
    make_plan(made, machine(), run_dir=Path("/run/x"), launch_id="L1", name="default")


def test_a_library_runs_on_one_machine() -> None:
    with pytest.raises(UsageError, match="xserve launch, one on each"):
        make_plan(config(), machine(), run_dir=Path("/run/x"), launch_id="L1", name="x", api=False)


def test_a_key_that_cannot_be_read() -> None:
    made = config(master_addr="127.0.0.1", cluster_key_file="/nonexistent/key")
    with pytest.raises(UsageError, match="--cluster-key-file /nonexistent/key"):
        make_plan(made, machine(), run_dir=Path("/run/x"), launch_id="L1", name="default")


def test_the_key_that_systemd_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.nodes.key_file import read_key, write_key

    write_key(tmp_path / "cluster.key")
    (tmp_path / "cluster.key").chmod(0o440)  # as systemd has it for a unit with a user of its own
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    made = config(master_addr="127.0.0.1")
    keyed = make_plan(made, machine(), run_dir=Path("/run/x"), launch_id="L1", name="default")
    assert agent(keyed).nodes.key == read_key(tmp_path / "cluster.key") != b""
    (tmp_path / "cluster.key").chmod(0o444)
    with pytest.raises(UsageError, match="may be read by others"):
        make_plan(made, machine(), run_dir=Path("/run/x"), launch_id="L1", name="default")
    (tmp_path / "cluster.key").unlink()
    assert agent(make_plan(made, machine(), run_dir=Path("/run/x"), launch_id="L1", name="default")).nodes.key == b""


# --- words ---------------------------------------------------------------------------------------------------------


def test_the_other_nodes_command_line() -> None:
    given = {
        "worker": "reference",
        "master_port": 29700,
        "worker_config": {"step_ms": "5", "hf_token": "hunter2"},
        "port": 9000,
        "api_key": "sesame",
        "numa_bind": True,
        "join_timeout": 20.0,
    }
    origins = {name: f"--{name}" for name in ("tp", "nnodes", *given)}
    notes = plan(config(**given, origins=origins)).notes
    command = next(note for note in notes if note.startswith("other nodes: "))
    assert command == (
        "other nodes: xserve launch --worker reference --worker-config step_ms=5 --worker-config 'hf_token=***'"
        " --tp 8 --join-timeout 20 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29700"
    )
    assert "node 0 of 2: the others join at 10.0.0.1:29700, interface eth0 (of the default route)" in notes


def test_the_other_nodes_command_line_of_many_and_by_a_link_local_address() -> None:
    at = config(master_addr="fe80::1%eth0", nnodes=4)
    notes = plan(at).notes
    assert (
        "other nodes (--node-rank 1 to 3): xserve launch --nnodes 4 --node-rank 1 --master-addr fe80::1%INTERFACE"
        in notes
    )


def test_without_a_key_one_loud_warning() -> None:
    said = [note for note in plan(config()).notes if "cluster-key-file" in note]
    assert len(said) == 1
    assert said[0].startswith("WARNING: no --cluster-key-file: whoever can reach 10.0.0.1:29501 can join")
    assert not [note for note in plan(config(), cluster_key=b"k").notes if "WARNING" in note]
    assert len([note for note in plan(config(1)).notes if "WARNING" in note]) == 1


def test_ports_and_a_firewall_rule() -> None:
    made = plan(config())
    assert [(row.name, row.value) for row in made.ports] == [
        ("HTTP", "127.0.0.1:8000"),
        ("master port", "TCP 10.0.0.1:29501"),
        ("engine core data", "TCP ephemeral on eth0"),
        ("TCPStore", "TCP ephemeral on eth0"),
        ("gloo, NCCL", "TCP ephemeral on eth0"),
    ]
    assert made.firewall is not None
    assert made.firewall.iptables == "iptables -I INPUT -i eth0 -s 10.0.0.0/24 -p tcp -j ACCEPT"
    assert 'iifname "eth0" ip saddr 10.0.0.0/24 meta l4proto tcp accept' in made.firewall.nft
    six = config(master_addr="fd00::1")
    made = plan(six, network=network(six, interfaces=(LO, IPV6_ONLY)))
    assert made.firewall is not None
    assert made.firewall.iptables == "ip6tables -I INPUT -i eth0 -s fd00::/64 -p tcp -j ACCEPT"
    assert "ip6 saddr fd00::/64" in made.firewall.nft
    one = config(1)
    made = plan(one, network=network(one, to_master=Route("eth0", "10.0.0.1")))
    assert [row.name for row in made.ports] == ["gloo, NCCL"]
    assert made.firewall is not None
    assert "10.0.0.0/24" in made.firewall.iptables


def test_shown_without_the_key() -> None:
    made = plan(config(), cluster_key=b"very secret key of the cluster!!")
    shown = json.dumps(to_json(made))
    assert "very secret" not in shown
    assert msgspec.json.encode(b"very secret key of the cluster!!").decode().strip('"') not in shown
    decoded = json.loads(shown)
    assert [p["settings"].get("nodes", {}).get("key") for p in decoded["processes"][1:]] == [HIDDEN, HIDDEN]
    assert decoded["ports"][1]["value"] == "TCP 10.0.0.1:29501"
    assert decoded["firewall"]["iptables"].startswith("iptables ")
    assert [(row.title, row.listens) for row in rows(made) if row.role == "node_agent"] == [
        ("NodeAgent_N0", "10.0.0.1:29501")
    ]
    follower = rows(plan(config(1)))
    assert [(row.title, row.parent) for row in follower][1:3] == [
        ("NodeAgent_N1", "Supervisor"),
        ("Worker_DP0_PP0_TP4", "NodeAgent_N1"),
    ]
    assert {d.name: d.value for d in made.decisions}["ranks here"] == "0-3 of 8"


def test_flags_of_several_nodes_without_nnodes_are_told() -> None:
    given = LaunchConfig(origins={"master_addr": "--master-addr", "iface": "--iface", "tp": "--tp"})
    assert node_notes(given, None, keyed=False) == (
        "WARNING: --master-addr and --iface: not used without --nnodes 2 or more",
    )
    assert node_notes(LaunchConfig(), None, keyed=False) == ()
