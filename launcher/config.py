"""Settings as frozen structs: what the command line becomes, and what each role is told.

`LaunchConfig` is the whole command line, checked and typed, nothing resolved. `plan/` resolves it against the host into
a `LaunchPlan`, whose processes carry one of the role structs below as their payload. Nothing here does I/O.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

REFERENCE_WORKER = "launcher.worker.reference:ReferenceWorker"
TRANSFORMERS_WORKER = "launcher.models.worker:TransformersWorker"
BLOCK_SIZE = 16
"""Tokens per KV block."""
RING_BYTES = 16 << 20
MASTER_PORT = 29501

StartMethod = Literal["auto", "fork", "spawn", "forkserver"]
RestartPolicy = Literal["never", "on-failure", "always"]
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `xserve launch`, typed. ``None`` means "not given: let the plan decide"."""

    model: str | None = None
    """A directory or a Hugging Face id."""
    worker: str | None = None
    """``reference``, ``transformers`` or ``module:Class``."""
    worker_extension: str | None = None
    worker_config: dict[str, str] = {}
    backend: str | None = None
    """``uni``, ``mp`` or ``module:Class``."""
    tp: int = 1
    nnodes: int = 1
    """Machines that share the ranks of the launch: as many each, consecutive ones."""
    node_rank: int = 0
    master_addr: str | None = None
    """Node 0's address, as the others reach it: a name, or a literal (IPv6 without brackets; link-local with zone).
    None on node 0: the address of `iface`, or of the default route."""
    master_port: int = MASTER_PORT
    iface: str | None = None
    """None: the interface that routes to the master."""
    join_timeout: float = 300.0
    """Seconds that a node waits for the others, at the start and after one was lost."""
    cluster_key_file: str | None = None
    device: Device = "auto"
    dtype: DType = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_cache_memory: int | None = None
    """Bytes of KV cache per rank."""
    gpu_memory_utilization: float = 0.9
    """Of each card: what everybody on it together may hold, KV cache included."""
    seed: int = 0
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_key: str | None = None
    api_key_file: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ready_timeout: float = 600.0
    """Seconds without progress after which a start is given up."""
    shutdown_timeout: float = 30.0
    """Seconds that the whole tree has for a stop, drain included."""
    watchdog_timeout: float = 30.0
    """Seconds without a sign of progress after which a process counts as hung; 0: never."""
    restart: RestartPolicy = "on-failure"
    """``never``; ``on-failure``: only after the first READY; ``always``: a failed first start too."""
    max_restarts: int = 5
    """Of one process (a core counts with its workers) within `restart_window`; 0 is ``never``."""
    restart_window: float = 600.0
    """Seconds."""
    restart_backoff: float = 30.0
    """Seconds that a restart waits at most; 0: it comes at once, however often."""
    name: str | None = None
    start_method: StartMethod = "auto"
    ring_bytes: int = RING_BYTES
    log_level: str = "info"
    device_ids: tuple[str, ...] = ()
    """Devices to use, as CUDA_VISIBLE_DEVICES names them; empty: the visible ones, in order."""
    numa_bind: bool = False
    numa_bind_nodes: tuple[int, ...] = ()
    """One node for each local worker, or one for all; empty: the one its device is close to."""
    numa_bind_cpus: tuple[tuple[int, ...], ...] = ()
    """CPUs of each local worker, or one set for all; empty: those of its node."""
    env: dict[str, str] = {}
    """For engine cores and workers."""
    origins: dict[str, str] = {}
    """Field → what gave it: ``--tp``, ``XSERVE_TP``, ``chat.toml: tp``; those that are not in it have their default."""


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands in the world (row 21 of the mission: ExternalDP x DP x PP x PCP x TP, TP fastest)."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    """Ranks of one engine core: pp * tp. WORLD over DP is the groups' business."""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine of several is told: its agent, and on node 0 the engine core too."""

    nnodes: int
    node_rank: int
    ranks_per_node: int
    """Of one engine core: node k runs ranks ``k * ranks_per_node`` up to the next node's."""
    master_addr: str
    """As given by the user; on node 0 a literal of its own."""
    master_port: int = MASTER_PORT
    iface: str = ""
    """Given, or on node 0 that of its address; empty on the others: the one that routes to the master."""
    address: str = ""
    """This machine's literal on `iface`, with a zone if link-local; empty: found by the agent with `iface`."""
    local_endpoint: str = ""
    """``ipc://…`` in the run directory: node 0's agent listens there for the engine core."""
    join_timeout: float = 300.0
    key: bytes = b""
    """The cluster key's content; empty: none, everybody who can reach the port may join."""
    agreement: dict[str, str] = {}
    """Option → value, for all that must be the same on every node."""
    owner: str = ""
    """This node's supervisor (its launch id): tells a restarted agent from a second node with the same rank."""
    restart: bool = True
    """False: whoever loses a peer ends (exit 69)."""
    silence_limit: float = 10.0
    """Seconds without a heartbeat after which a node counts as lost."""

    def __repr__(self) -> str:
        key = "with a key" if self.key else "without a key"  # the key itself is not for logs
        return f"NodeSettings(node {self.node_rank} of {self.nnodes}, {self.master_addr} {self.master_port}, {key})"


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that a node agent is told. Its workers (none on node 0) are `ProcessSpec.children` of its own spec."""

    nodes: NodeSettings
    world_size: int = 1
    ring_bytes: int = RING_BYTES
    ready_timeout: float = 600.0
    shutdown_timeout: float = 30.0
    watchdog_timeout: float = 0.0
    generation: int = 0
    """Lives of this agent: not the group's generation, which node 0 says."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that one worker is told. Handed to the worker class's constructor; also used by `uni` in process."""

    worker: str = REFERENCE_WORKER
    """``module:Class``, resolved."""
    worker_extension: str | None = None
    worker_config: dict[str, str] = {}
    ranks: RankSettings = RankSettings()
    rendezvous: str = ""
    """``file:///…`` or ``tcp://…`` for torch.distributed; handed over as an argument, never by the environment."""
    model: str | None = None
    """A directory with config.json and weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    device_index: int = 0
    device_ranks: int = 1
    """Workers of ours on that device, this one included."""
    host_collectives: bool = False
    """Groups meet in host memory: some of the ranks share a device, which NCCL refuses. The same on all ranks."""
    group_timeout: float = 600.0
    """Seconds that a rank waits for the others, at the rendezvous and in a collective. Longer than the limits of ours,
    which name who is late."""
    dtype: DType = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = BLOCK_SIZE
    kv_cache_memory: int | None = None
    """Bytes of KV cache for this rank; None: the worker says what is free."""
    gpu_memory_utilization: float = 0.9
    """Of the card, everybody on it included; without effect where `kv_cache_memory` is given."""
    local_world_size: int = 1
    """Workers of ours on this machine: what is free is shared over them."""
    num_threads: int = 1
    """OMP budget of this worker."""
    seed: int = 0
    generation: int = 0
    """The core's life that this worker belongs to (set by the executor)."""
    awaits_group: bool = False
    """Several nodes: rendezvous and generation come by the handover ``group``, once all nodes have joined."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine core is told. Its workers are `ProcessSpec.children` of its own spec."""

    backend: str = "mp"
    worker: WorkerSettings = WorkerSettings()
    """Rank 0's settings: for `uni`, and for limits that all ranks share."""
    dp_rank: int = 0
    address: str = ""
    """ZMQ endpoint that the core binds for API servers, e.g. ``ipc:///run/…/core0``."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    """None: the workers' spec decides (a model's context length, reference: 4096)."""
    block_size: int = BLOCK_SIZE
    ring_bytes: int = RING_BYTES
    ready_timeout: float = 600.0
    shutdown_timeout: float = 30.0
    seed: int = 0
    watchdog_timeout: float = 0.0
    """Seconds that a rank may be in one call; 0: no limit."""
    generation: int = 0
    """Counts the lives of this core; every message carries it, older ones are dropped."""
    nodes: NodeSettings | None = None
    """None: one machine."""


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that an API server is told. Its listening socket arrives as the descriptor ``http``."""

    index: int = 0
    engine_addresses: tuple[str, ...] = ()
    model: str | None = None
    """Directory of the tokenizer; None: the reference tokenizer."""
    served_model_name: str = "reference"
    api_keys: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    max_waiting: int = 4096
    """Requests accepted but not finished, above which new ones get 503."""
    restart: bool = False
    """True: an engine core that dies comes back, and its requests are kept for it. False: they fail with it."""
    max_body_bytes: int = 32 << 20
    """Longest request body; longer ones get 413."""
    log_level: str = "info"


def encode(settings: Any) -> bytes:
    """A role's settings as the payload of its `ProcessSpec`."""
    return msgspec.msgpack.encode(settings)
