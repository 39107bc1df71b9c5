"""The process table: one `ProcessSpec` for each process, with its settings, names and environment.

A launch of tensor-parallel size N is N + 2 processes: one API server, one engine core, and its N children. With the
``uni`` executor the engine core is the one rank, and has no children. Over several nodes, node 0 has a node agent
besides, and its share of the workers; the others have a node agent with their workers as its children.
"""

from __future__ import annotations

import msgspec

from launcher.config import (
    AgentSettings,
    ApiSettings,
    EngineSettings,
    LaunchConfig,
    NodeSettings,
    RankSettings,
    WorkerSettings,
    encode,
)
from launcher.errors import InternalError
from launcher.plan import front, names
from launcher.plan.agreement import agreement
from launcher.plan.devices import through_host
from launcher.plan.placement import Placement
from launcher.plan.resolved import Files, Place, Resolved
from launcher.plan.settings import group_timeout
from launcher.process.spec import ChildMethod, ProcessSpec, Role

API_TARGET = "launcher.api.server:run"
CORE_TARGET = "launcher.engine.core_process:run"
AGENT_TARGET = "launcher.executor.node_agent:run"
WORKER_TARGET = "launcher.worker.main:run"

Settings = ApiSettings | EngineSettings | WorkerSettings | AgentSettings
_SETTINGS: dict[Role, type[Settings]] = {
    "api_server": ApiSettings,
    "engine_core": EngineSettings,
    "worker": WorkerSettings,
    "node_agent": AgentSettings,
}
_WORKERS_START: dict[ChildMethod, ChildMethod] = {
    "fork": "fork",
    "spawn": "spawn",
    # The core itself is a fork of the helper, still single-threaded: its own forks are as clean as the helper's.
    "forkserver": "fork",
}
"""How an engine core starts its workers, by how it was started itself."""


def settings_of(spec: ProcessSpec) -> Settings:
    """The settings in a spec's payload."""
    if spec.role not in _SETTINGS:
        raise InternalError(f"{spec.title} is a {spec.role}, which has no settings")
    return msgspec.msgpack.decode(spec.payload, type=_SETTINGS[spec.role])


def api_server(config: LaunchConfig, place: Place, files: Files, made: Resolved, env: dict[str, str]) -> ProcessSpec:
    title, comm = names.api_server(0)
    settings = ApiSettings(
        index=0,
        engine_addresses=(front.engine_address(place.run_dir, 0),),
        model=str(files.model) if files.model is not None else None,
        served_model_name=made.served_name.value,
        restart=made.restarts,
        api_keys=files.api_keys,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        log_level=config.log_level,
    )
    return ProcessSpec(
        title=title,
        comm=comm,
        role="api_server",
        target=API_TARGET,
        env=env,
        payload=encode(settings),
        instance=place.name,
        launch_id=place.launch_id,
    )


def of_generation(spec: ProcessSpec, generation: int) -> ProcessSpec:
    """`spec` for its n-th life: engine cores, node agents and workers know it, and each life's ranks meet in a file of
    its own (on several nodes at a place that is handed over)."""
    if spec.role not in ("engine_core", "worker", "node_agent"):
        return spec
    settings = settings_of(spec)
    if isinstance(settings, EngineSettings):
        worker = _worker_of_generation(settings.worker, generation)
        settings = msgspec.structs.replace(settings, generation=generation, worker=worker)
    elif isinstance(settings, AgentSettings):
        settings = msgspec.structs.replace(settings, generation=generation)
    elif isinstance(settings, WorkerSettings):
        settings = _worker_of_generation(settings, generation)
    children = tuple(of_generation(child, generation) for child in spec.children)
    return msgspec.structs.replace(spec, payload=encode(settings), children=children)


def _worker_of_generation(settings: WorkerSettings, generation: int) -> WorkerSettings:
    rendezvous = front.rendezvous_of_generation(settings.rendezvous, generation)
    return msgspec.structs.replace(settings, generation=generation, rendezvous=rendezvous)


def node_settings(config: LaunchConfig, place: Place, files: Files, made: Resolved) -> NodeSettings | None:
    """None on one machine."""
    if made.at is None:
        return None
    return NodeSettings(
        nnodes=config.nnodes,
        node_rank=config.node_rank,
        ranks_per_node=len(made.local_ranks),
        master_addr=made.at.master,
        master_port=config.master_port,
        iface=made.at.iface,
        address=made.at.address,
        local_endpoint=front.agent_address(place.run_dir) if config.node_rank == 0 else "",
        join_timeout=config.join_timeout,
        key=files.cluster_key,
        agreement=agreement(config, files, made),
        owner=place.launch_id,
        restart=made.restarts,
    )


def node_agent(config: LaunchConfig, place: Place, files: Files, made: Resolved, env: dict[str, str]) -> ProcessSpec:
    """This node's agent: alone on node 0, where the workers are the engine core's; else the parent of its workers."""
    title, comm = names.node_agent(config.node_rank)
    nodes = node_settings(config, place, files, made)
    assert nodes is not None
    settings = AgentSettings(
        nodes=nodes,
        world_size=made.layout.world_size,
        ring_bytes=config.ring_bytes,
        ready_timeout=config.ready_timeout,
        shutdown_timeout=config.shutdown_timeout,
        watchdog_timeout=config.watchdog_timeout,
        generation=place.generation,
    )
    return ProcessSpec(
        title=title,
        comm=comm,
        role="node_agent",
        target=AGENT_TARGET,
        node=config.node_rank,
        env=env,
        payload=encode(settings),
        children=_workers(config, place, files, made, env) if config.node_rank else (),
        child_method=_WORKERS_START[made.start.value],
        instance=place.name,
        launch_id=place.launch_id,
    )


def engine_core(config: LaunchConfig, place: Place, files: Files, made: Resolved, env: dict[str, str]) -> ProcessSpec:
    """Engine core 0 with its workers; `env` is for both, since the ``uni`` executor's worker lives in the core."""
    title, comm = names.engine_core(0)
    alone = made.backend.value == "uni"
    bound = made.placements.workers[0] if alone else Placement()
    settings = EngineSettings(
        backend=made.backend.value,
        worker=_worker_settings(config, place, files, made, 0),
        dp_rank=0,
        address=front.engine_address(place.run_dir, 0),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        ring_bytes=config.ring_bytes,
        ready_timeout=config.ready_timeout,
        shutdown_timeout=config.shutdown_timeout,
        seed=config.seed,
        watchdog_timeout=config.watchdog_timeout,
        generation=place.generation,
        nodes=node_settings(config, place, files, made),
    )
    return ProcessSpec(
        title=title,
        comm=comm,
        role="engine_core",
        target=CORE_TARGET,
        env=env | (made.devices[0].env if alone else {}),
        cpus=bound.cpus,
        memory_nodes=bound.memory_nodes,
        payload=encode(settings),
        children=() if alone else _workers(config, place, files, made, env),
        child_method=_WORKERS_START[made.start.value],
        instance=place.name,
        launch_id=place.launch_id,
    )


def _workers(
    config: LaunchConfig, place: Place, files: Files, made: Resolved, env: dict[str, str]
) -> tuple[ProcessSpec, ...]:
    """Those of this machine."""
    each = (_worker_settings(config, place, files, made, rank) for rank in made.local_ranks)
    return tuple(_worker(place, made, env, settings) for settings in each)


def _worker(place: Place, made: Resolved, env: dict[str, str], settings: WorkerSettings) -> ProcessSpec:
    rank, local = settings.ranks.rank, settings.ranks.local_rank
    title, comm = names.worker(rank, made.layout.coordinates(rank))
    bound = made.placements.workers[local]
    return ProcessSpec(
        title=title,
        early_title=names.EARLY_WORKER,
        comm=comm,
        role="worker",
        target=WORKER_TARGET,
        rank=rank,
        node=made.config.node_rank,
        env=env | made.devices[local].env,
        cpus=bound.cpus,
        memory_nodes=bound.memory_nodes,
        payload=encode(settings),
        instance=place.name,
        launch_id=place.launch_id,
    )


def _worker_settings(config: LaunchConfig, place: Place, files: Files, made: Resolved, rank: int) -> WorkerSettings:
    at, layout = made.layout.coordinates(rank), made.layout
    local = made.local_ranks.index(rank)
    ranks = RankSettings(
        rank=rank,
        local_rank=local,
        world_size=layout.world_size,
        tp_rank=at.tp,
        tp_size=layout.tp,
        pp_rank=at.pp,
        pp_size=layout.pp,
        dp_rank=at.dp,
        dp_size=layout.dp,
    )
    return WorkerSettings(
        worker=made.worker.value,
        worker_extension=config.worker_extension,
        worker_config=config.worker_config,
        ranks=ranks,
        rendezvous="" if made.at else front.rendezvous(place.run_dir, place.launch_id, at.dp, place.generation),
        awaits_group=made.at is not None,
        model=str(files.model) if files.model is not None else None,
        device=made.device.value,
        device_index=made.devices[local].number,
        device_ranks=made.devices[local].workers,
        host_collectives=through_host(made.devices),
        group_timeout=group_timeout(config),
        dtype=made.dtype.value,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_cache_memory=config.kv_cache_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
        local_world_size=len(made.local_ranks),
        num_threads=made.threads.number,
        seed=config.seed,
        generation=place.generation,
    )
