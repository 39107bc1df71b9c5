"""What several processes of one plan share: where the launch lives, what was read for it, and each decision once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from launcher.config import REFERENCE_WORKER, LaunchConfig
from launcher.host import HostFacts
from launcher.nodes.addresses import host_port
from launcher.parallel.ranks import Layout
from launcher.plan import budget, choices, devices, placement
from launcher.plan.checkpoint import Checkpoint
from launcher.plan.network import Network, choose_address
from launcher.plan.support import is_proven

_FEW_FILES = 4096
"""Below it a busy server runs out of descriptors: each stream is one."""


class Decision(msgspec.Struct, frozen=True):
    """A setting that the plan chose or took over, for people."""

    name: str
    value: str
    origin: str


class Place(NamedTuple):
    """Where a launch lives, and which launch and life it is."""

    run_dir: Path
    launch_id: str
    name: str
    generation: int = 0


class Files(NamedTuple):
    """What was read from disk for a plan."""

    model: Path | None = None
    checkpoint: Checkpoint | None = None
    """Only for the transformers worker: what others do with a model is theirs to know."""
    api_keys: tuple[str, ...] = ()
    at_exec: tuple[str, ...] = ()
    """Variables for the workers that only an exec can give them."""
    causal_lm_types: frozenset[str] = frozenset()
    """What transformers calls causal language models; empty: it cannot be told."""
    network: Network | None = None
    """None: a launch on one machine, which needs none."""
    cluster_key: bytes = b""
    model_digest: str = ""
    """Only for several nodes, as `torch_version`; see `launcher.plan.agreement`."""
    torch_version: str = ""


class Resolved:
    """The decisions of one plan. Raises what `launcher.plan.choices` raises."""

    def __init__(self, config: LaunchConfig, facts: HostFacts, files: Files) -> None:
        self.config = config
        self.facts = facts
        self.worker = choices.choose_worker(config)
        self.backend = choices.choose_backend(config)
        self.device = choices.choose_device(config, facts, self.worker.value)
        self.dtype = choices.choose_dtype(config, self.device.value, files.checkpoint)
        self.start = choices.choose_start(config, facts, files.at_exec)
        self.layout = Layout(tp=config.tp)
        self.restarts = config.restart != "never" and config.max_restarts > 0
        self.at = choose_address(config, files.network) if files.network is not None else None
        """Where this node is; None on one machine."""
        each = self.layout.world_size // config.nnodes
        self.local_ranks = range(config.node_rank * each, (config.node_rank + 1) * each)
        """Ranks that run on this machine: its devices, threads and memory are for them alone."""
        self.devices = devices.place_devices(config, facts, self.device.value, each)
        self.placements = placement.place_workers(config, facts, [device.gpu for device in self.devices])
        self.threads = budget.thread_budget(facts, each, [p.cpus for p in self.placements.workers])
        self.checkpoint = files.checkpoint
        self.model_type = files.checkpoint.model_type if files.checkpoint is not None else None
        self.served_name = choices.served_name(config, self.worker.value, files.model)

    def decisions(self) -> tuple[Decision, ...]:
        return (
            Decision("worker", *self.worker),
            Decision("backend", *self.backend),
            Decision("device", *self.device),
            Decision("dtype", *self.dtype),
            Decision("start method", *self.start),
            Decision("OMP threads", str(self.threads.number), self.threads.origin),
            Decision("KV cache", *self._kv_memory()),
            Decision("memory of a worker", *self.memory()),
            Decision("NUMA", *self._numa()),
            Decision("served model name", *self.served_name),
            *self._nodes(),
        )

    def _nodes(self) -> tuple[Decision, ...]:
        at, config = self.at, self.config
        if at is None:
            return ()
        ranks, place = self.local_ranks, f"--node-rank {config.node_rank} of --nnodes {config.nnodes}"
        return (
            Decision(
                "ranks here", f"{ranks.start}-{ranks[-1]} of {config.tp}" if len(ranks) > 1 else str(ranks[0]), place
            ),
            Decision(
                "master",
                host_port(at.master, config.master_port),
                at.origin if config.node_rank == 0 else "--master-addr",
            ),
            Decision("interface", at.iface or "found at the start", at.origin),
        )

    def notes(self) -> tuple[str, ...]:
        """Lines for the start of the log: what surprises first."""
        lines = []
        reference = self.worker.value == REFERENCE_WORKER
        if reference and self.config.worker is None:
            lines.append("no --model and no --worker: the reference worker answers, with made-up tokens")
        if reference and self.config.device == "cuda":
            lines.append("--device cuda has no effect: the reference worker computes nothing")
        elif self.facts.gpu_note and not reference and self.config.device != "cpu":
            lines.append(self.facts.gpu_note)
        if self.model_type is not None and not is_proven(self.model_type):
            lines.append(
                f"model type {self.model_type} was never tried: the workers compare it with transformers first"
            )
        lines.append(f"start method {self.start.value}: {self.start.reason}")
        lines += self.placements.notes
        if any(device.workers > 1 for device in self.devices) and self.device.value == "cuda":
            lines.append("--device-ids puts several workers on one GPU: they meet in host memory, which is slow")
        elif self.layout.world_size > 1 and devices.through_host(self.devices):
            lines.append("MIG slices reach no other GPU: the workers meet in host memory, which is slow")
        if self.facts.nofile_soft < self.facts.nofile_hard:
            lines.append(f"open files: limit raised from {self.facts.nofile_soft} to {self.facts.nofile_hard}")
        elif self.facts.nofile_hard < _FEW_FILES:
            lines.append(
                f"open files: the hard limit is {self.facts.nofile_hard}, about {self.facts.nofile_hard // 2}"
                " connections at a time; raise it with ulimit -Hn or LimitNOFILE="
            )
        lines.append(f"OMP threads {self.threads.number} per worker: {self.threads.origin}")
        if not reference:
            lines.append("KV cache {}: {}".format(*self._kv_memory()))
        return tuple(lines)

    def memory(self) -> tuple[str, str]:
        """What one worker will hold at least, as far as its model's files tell."""
        given = self.config.kv_cache_memory
        if self.checkpoint is None:
            return (f"{budget.size(given)} of KV cache" if given else "the worker decides"), "no model files to go by"
        length = self.config.max_model_len
        workers = len(self.local_ranks)
        need = budget.memory_need(
            self.checkpoint, self.dtype.value, self.config.tp, given, length, local_workers=workers
        )
        return budget.size((need.weights + need.kv) // workers), f"at least; of all here: {need.line}"

    def _numa(self) -> tuple[str, str]:
        asked = [field for field in ("numa_bind_cpus", "numa_bind_nodes", "numa_bind") if getattr(self.config, field)]
        if not asked:
            return "not bound", "default; see --numa-bind"
        bound = any(worker.cpus or worker.memory_nodes for worker in self.placements.workers)
        return ("bound" if bound else "not bound"), f"--{asked[0].replace('_', '-')}"

    def _kv_memory(self) -> tuple[str, str]:
        given = self.config.kv_cache_memory
        if given is not None:
            return f"{budget.size(given)} per rank", "--kv-cache-memory"
        if self.device.value == "cuda":
            share = f"{self.config.gpu_memory_utilization:g} of each GPU, less what is in use once the model is loaded"
            return f"{share} and a step's peak", self.config.origins.get("gpu_memory_utilization", "default on CUDA")
        ranks = f", shared by {len(self.local_ranks)} ranks" if len(self.local_ranks) > 1 else ""
        free = f"{budget.size(self.facts.memory_free)} now ({self.facts.memory_origin})"
        return f"half of what is free once the model is loaded{ranks}", f"default on CPU; free are {free}"
