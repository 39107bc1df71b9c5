"""`make_plan`: the command line and the facts of the host become one frozen `LaunchPlan`.

Two halves. `make_plan` reads what is not in the facts: the model directory (or the hub), key and certificate files.
`decide` is pure: the same arguments give the same plan.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from launcher.config import TRANSFORMERS_WORKER, LaunchConfig
from launcher.host import HostFacts
from launcher.host.process_state import needs_exec
from launcher.plan import budget, checkpoint, choices, environment, front, names, processes, support
from launcher.plan.model_source import resolve_model
from launcher.plan.resolved import Decision, Files, Place, Resolved
from launcher.plan.settings import limits, settings
from launcher.process import numa
from launcher.process.spec import ChildMethod, ProcessSpec

_ENGINE_PRELOAD = ("launcher.engine.core_process", "launcher.engine.core_loop", "launcher.worker.main")
"""`core_loop` brings the code of ZMQ; its threads come with its first context, in the engine core."""


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
    """None: a launch without API servers."""
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

    def method_of(self, spec: ProcessSpec) -> ChildMethod:
        """How the supervisor starts one of `processes`.

        API servers always come by exec, while the helper imports: they answer probes from the first second on, and
        have no use for what the helper loads.
        """
        return "spawn" if spec.role == "api_server" else self.start_method


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
    # First all that needs no reading: nobody shall wait for a download to hear of a mistyped flag.
    if config.numa_bind or config.numa_bind_nodes or config.numa_bind_cpus:
        facts = msgspec.structs.replace(facts, numa_denied=numa.denied())
    at_exec = tuple(needs_exec(config.env))
    worker = Resolved(config, facts, Files(at_exec=at_exec)).worker.value
    if api:
        front.choose_binding(config)
        front.check_tls(config)
    files = Files(api_keys=front.read_api_keys(config) if api else (), at_exec=at_exec)
    if config.model is not None:
        files = files._replace(model=resolve_model(config.model))
    if files.model is not None and worker == TRANSFORMERS_WORKER:
        found = checkpoint.read_checkpoint(files.model)
        files = files._replace(checkpoint=found, causal_lm_types=support.causal_lm_types())
    if files.model is not None and api:
        checkpoint.check_tokenizer(files.model)
    return decide(config, facts, Place(run_dir, launch_id, name, generation), files, api=api)


def decide(config: LaunchConfig, facts: HostFacts, place: Place, files: Files, *, api: bool = True) -> LaunchPlan:
    """The pure half: see `make_plan`."""
    choices.check_numbers(config)
    made = Resolved(config, facts, files)
    _check_model(config, facts, files, made)
    common = environment.base(place.launch_id, model_is_local=files.model is not None)
    engine_env = environment.engine(
        common, threads=made.threads.number, method=made.start.value, one_machine=True, given=config.env
    )
    http = front.choose_binding(config) if api else None
    helper = Helper(preload=preload(made.worker.value, config.worker_extension), env=engine_env)
    specs = [processes.engine_core(config, place, files, made, engine_env)]
    if api:
        specs.insert(0, processes.api_server(config, place, files, made, environment.front(common)))
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
        notes=made.notes(),
    )


def preload(worker: str, extension: str | None = None) -> tuple[str, ...]:
    """Modules for the helper, in the order of their import. torch only for the worker that is sure to want it."""
    own = (extension.partition(":")[0],) if extension else ()
    if worker == TRANSFORMERS_WORKER:
        return ("torch", *_ENGINE_PRELOAD, "launcher.models.preload", *own)
    return (*_ENGINE_PRELOAD, worker.partition(":")[0], *own)


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
        budget.check_memory(facts, budget.memory_need(model, dtype, config.tp, given, length))
