"""`make_plan`: the command line and the facts of the host become one frozen `LaunchPlan`.

Two halves. `make_plan` reads what is not in the facts: the model directory (or the hub), key and certificate files.
`decide` is pure: the same arguments give the same plan.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from launcher.config import TRANSFORMERS_WORKER, LaunchConfig
from launcher.errors import UsageError
from launcher.host import HostFacts
from launcher.host.process_state import needs_exec
from launcher.nodes.addresses import interface_environment
from launcher.plan import budget, checkpoint, choices, environment, front, names, processes, support
from launcher.plan.agreement import read_model_digest, read_torch_version
from launcher.plan.model_source import resolve_model
from launcher.plan.network import choose_address, read_network
from launcher.plan.node_words import key_path, node_notes, serves
from launcher.plan.ports import Firewall, check_ports, firewall, ports
from launcher.plan.resolved import Decision, Files, Place, Resolved
from launcher.plan.settings import limits, settings
from launcher.process import numa
from launcher.process.spec import ChildMethod, ProcessSpec, comes_by_exec

_ENGINE_PRELOAD = ("launcher.engine.core_process", "launcher.engine.core_loop", "launcher.worker.main")
"""`core_loop` brings the code of ZMQ; its threads come with its first context, in the engine core."""

_AGENT_PRELOAD = ("launcher.executor.node_agent", "launcher.worker.main")


class Helper(msgspec.Struct, frozen=True, kw_only=True):
    """The forkserver: what it imports before anything is forked from it, and its environment from the exec on."""

    preload: tuple[str, ...]
    env: dict[str, str]
    title: str = names.FORKSERVER
    comm: str = names.FORKSERVER_COMM


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a launch will be. Payloads hold secrets: print a plan by `launcher.plan.show` only."""

    name: str
    launch_id: str
    run_dir: str
    generation: int = 0
    processes: tuple[ProcessSpec, ...]
    """The supervisor's children, API servers first; workers are `children` of their engine core."""
    start_method: ChildMethod
    """How engine cores are started; see `method_of`, and `ProcessSpec.child_method` for their workers."""
    helper: Helper | None = None
    """Only for ``forkserver``."""
    http: front.HttpBinding | None = None
    """None: a launch without API servers (a library, a node that is not node 0)."""
    url: str = ""
    served_model_name: str
    ready_timeout: float
    shutdown_timeout: float
    world_size: int
    threads: int
    """OMP threads of each worker."""
    decisions: tuple[Decision, ...] = ()
    settings: tuple[Decision, ...] = ()
    """Every flag, with what gave it its value."""
    limits: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines for the start of the log."""
    serves: str = ""
    """What a launch without HTTP says when it is ready."""
    ports: tuple[Decision, ...] = ()
    """Where this node listens."""
    firewall: Firewall | None = None
    """Rules that let the nodes speak to each other, ready to be run; None: one machine."""

    def method_of(self, spec: ProcessSpec) -> ChildMethod:
        """How the supervisor starts one of `processes`.

        API servers always come by exec, while the helper imports: they answer probes from the first second on, and
        have no use for what the helper loads. So does an agent without workers: the other nodes may be here already.
        """
        return "spawn" if comes_by_exec(spec) else self.start_method


def make_plan(
    config: LaunchConfig,
    facts: HostFacts,
    *,
    run_dir: Path,
    launch_id: str,
    name: str,
    generation: int = 0,
    api: bool = True,
) -> LaunchPlan:
    """Check everything that can be checked before a process is started, then decide.

    `api`: with API servers; a library has none. Raises `UsageError` and `HostError`, one line each. A model that is
    not on this machine yet is downloaded, with progress on stderr.
    """
    choices.check_numbers(config)
    several = config.nnodes > 1
    if several and not api:
        raise UsageError("nnodes: Engine runs on one machine; several nodes are started by xserve launch, one on each")
    api = api and config.node_rank == 0
    # First all that needs no reading: nobody shall wait for a download to hear of a mistyped flag.
    if config.numa_bind or config.numa_bind_nodes or config.numa_bind_cpus:
        facts = msgspec.structs.replace(facts, numa_denied=numa.denied())
    at_exec = tuple(needs_exec(config.env))
    worker = Resolved(config, facts, Files(at_exec=at_exec)).worker.value
    files = Files(at_exec=at_exec)
    if several:
        files = _read_nodes(config, facts, files)
    if api:
        front.check_tls(config)
        check_ports(
            config, front.choose_binding(config), choose_address(config, files.network) if files.network else None
        )
        files = files._replace(api_keys=front.read_api_keys(config))
    if config.model is not None:
        files = files._replace(model=resolve_model(config.model))
    if files.model is not None and worker == TRANSFORMERS_WORKER:
        found = checkpoint.read_checkpoint(files.model)
        files = files._replace(checkpoint=found, causal_lm_types=support.causal_lm_types())
    if files.model is not None and api:
        checkpoint.check_tokenizer(files.model)
    if several:
        digest = read_model_digest(files.model) if files.model is not None else ""
        files = files._replace(model_digest=digest, torch_version=read_torch_version(worker))
    return decide(config, facts, Place(run_dir, launch_id, name, generation), files, api=api)


def _read_nodes(config: LaunchConfig, facts: HostFacts, files: Files) -> Files:
    """What several nodes need: this machine's addresses, and the cluster key."""
    from launcher.nodes.key_file import read_key

    path = key_path(config)
    key = read_key(path) if path is not None else b""
    return files._replace(network=read_network(config, facts.hostname), cluster_key=key)


def decide(config: LaunchConfig, facts: HostFacts, place: Place, files: Files, *, api: bool = True) -> LaunchPlan:
    """The pure half: see `make_plan`. `files.network` is there exactly when ``nnodes`` is above 1."""
    choices.check_numbers(config)
    made = Resolved(config, facts, files)
    _check_model(config, facts, files, made)
    common = environment.base(place.launch_id, model_is_local=files.model is not None)
    engine_env = environment.engine(
        common, threads=made.threads.number, method=made.start.value, interface=_interface(made), given=config.env
    )
    api = api and config.node_rank == 0
    http = front.choose_binding(config) if api else None
    leads = config.node_rank == 0
    helper = Helper(preload=preload(made.worker.value, config.worker_extension, core=leads), env=engine_env)
    specs = [processes.api_server(config, place, files, made, environment.front(common))] if api else []
    if made.at is not None:
        agent_env = environment.front(common) if leads else engine_env
        specs.append(processes.node_agent(config, place, files, made, agent_env))
    if leads:
        specs.append(processes.engine_core(config, place, files, made, engine_env))
    return LaunchPlan(
        name=place.name,
        launch_id=place.launch_id,
        run_dir=str(place.run_dir),
        generation=place.generation,
        processes=tuple(specs),
        start_method=made.start.value,
        helper=helper if made.start.value == "forkserver" else None,
        http=http,
        url=http.url() if http else "",
        served_model_name=made.served_name.value,
        ready_timeout=config.ready_timeout,
        shutdown_timeout=config.shutdown_timeout,
        world_size=made.layout.world_size,
        threads=made.threads.number,
        decisions=made.decisions(),
        settings=settings(config),
        limits=limits(config, facts),
        notes=(*node_notes(config, made.at, keyed=bool(files.cluster_key)), *made.notes()),
        serves=serves(config, made.at, made.local_ranks) if made.at and not api else "",
        ports=ports(config, http, made.at),
        firewall=firewall(made.at) if made.at else None,
    )


def _interface(made: Resolved) -> dict[str, str]:
    if made.at is None:
        return environment.LOOPBACK
    # Where it is not known yet, it comes with the group.
    return interface_environment(made.at.iface, made.at.address) if made.at.iface and made.at.address else {}


def preload(worker: str, extension: str | None = None, *, core: bool = True) -> tuple[str, ...]:
    """Modules for the helper, in the order of their import. torch only for the worker that is sure to want it. `core`:
    an engine core is forked from it; else a node agent."""
    own = (extension.partition(":")[0],) if extension else ()
    first = _ENGINE_PRELOAD if core else _AGENT_PRELOAD
    if worker == TRANSFORMERS_WORKER:
        return ("torch", *first, "launcher.models.preload", *own)
    return (*first, worker.partition(":")[0], *own)


def _check_model(config: LaunchConfig, facts: HostFacts, files: Files, made: Resolved) -> None:
    model = files.checkpoint
    if model is None:
        return
    support.check_architecture(model, config.tp, files.causal_lm_types)
    checkpoint.check_tensor_parallel(model, config.tp)
    checkpoint.check_model_len(model, config.max_model_len)
    dtype, given, length = made.dtype.value, config.kv_cache_memory, config.max_model_len
    budget.check_kv_memory(model, dtype, config.tp, given, length)
    if made.device.value == "cpu":
        need = budget.memory_need(model, dtype, config.tp, given, length, local_workers=len(made.local_ranks))
        budget.check_memory(facts, need)
