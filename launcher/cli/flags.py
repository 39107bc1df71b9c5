"""The table of flags. Parsing, `--help`, "did you mean", XSERVE_<FLAG> and the README's table follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from launcher.cli import values
from launcher.logs import LEVELS

Kind = Literal["value", "repeated", "switch"]


class Flag(NamedTuple):
    """One flag. Dashes in `name` and `aliases` may be written as underscores in a long flag."""

    name: str
    metavar: str
    help: str
    parse: Callable[[str], Any] = values.text
    aliases: tuple[str, ...] = ()
    default: str = ""
    """For people; the value itself is `LaunchConfig`'s default."""
    kind: Kind = "value"
    example: str = ""
    joint: str = ""
    """What stands between the parts of a list, for those that take one."""
    positional: bool = False
    """Also taken from a word without a flag."""

    @property
    def field(self) -> str:
        """Its parameter, and its field of `LaunchConfig`."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}

NAME = Flag(
    "--name",
    "NAME",
    "Name of the instance, for status and stop.",
    values.instance_name,
    default="default, default-2, …",
    example="chat",
)
JSON = Flag("--json", "", "Print JSON.", kind="switch")

CONFIG = Flag(
    "--config",
    "FILE",
    "TOML or YAML file with flags: tp = 4. Flags and variables win over it.",
    example="chat.toml",
)

LAUNCH: tuple[Flag, ...] = (
    Flag(
        "--model",
        "DIR_OR_ID",
        "Directory of a Hugging Face model, or its id. Without a model the reference worker runs.",
        example="./SmolLM2",
    ),
    Flag(
        "--tp",
        "N",
        "Tensor-parallel ranks: worker processes over which each layer is split.",
        values.whole(1),
        ("-tp", "--tp-size", "--tensor-parallel-size"),
        "1",
        example="4",
    ),
    Flag(
        "--nnodes",
        "N",
        "Machines that share the ranks: the same command on each, with its --node-rank.",
        values.whole(1),
        ("-n",),
        "1",
        example="2",
    ),
    Flag(
        "--node-rank",
        "N",
        "Which of the machines this is: 0 to nnodes - 1; node 0 serves HTTP.",
        values.whole(0),
        ("-r",),
        "0",
        example="1",
    ),
    Flag(
        "--master-addr",
        "ADDRESS",
        "Node 0's address or name, as the other nodes reach it; on node 0 an address of its own.",
        values.host,
        default="on node 0: of --iface, or of the default route",
        example="10.0.0.1",
    ),
    Flag(
        "--master-port",
        "PORT",
        "TCP port on node 0 at which the others join.",
        values.whole(1, 65535),
        default="29501",
        example="29501",
    ),
    Flag(
        "--dist-init-addr",
        "HOST:PORT",
        "--master-addr and --master-port in one.",
        values.host_port,
        example="10.0.0.1:29501",
    ),
    Flag(
        "--iface",
        "NAME",
        "Network interface between the nodes: for xserve, gloo and NCCL alike.",
        values.interface,
        default="the one that leads to node 0",
        example="eth0",
    ),
    Flag(
        "--join-timeout",
        "SECONDS",
        "How long a node waits for the others, at the start and when one was lost.",
        values.seconds(1),
        default="300",
        example="600",
    ),
    Flag(
        "--cluster-key-file",
        "FILE",
        "Key that all nodes share (xserve keygen): without it, whoever reaches the master port can join.",
        default="$CREDENTIALS_DIRECTORY/cluster.key, if it is there",
        example="/etc/xserve/cluster.key",
    ),
    Flag(
        "--backend",
        "NAME",
        "How workers run: uni (in the engine core), mp (a process each) or module:Class.",
        values.name_or_class("uni", "mp"),
        ("--distributed-executor-backend",),
        "uni for one rank, else mp",
        example="mp",
    ),
    Flag(
        "--worker",
        "NAME",
        "reference, transformers or module:Class.",
        values.name_or_class("reference", "transformers"),
        default="transformers with --model, else reference",
        example="my.module:MyWorker",
    ),
    Flag(
        "--worker-extension",
        "MODULE:CLASS",
        "Class mixed into the worker: its methods can be called with collective_rpc.",
        values.name_or_class(),
        example="my.module:Mixin",
    ),
    Flag(
        "--worker-config",
        "KEY=VALUE",
        "A setting of the worker's own; can be repeated.",
        values.pair,
        kind="repeated",
        example="step_ms=5",
    ),
    Flag("--device", "NAME", "auto, cpu or cuda.", values.one_of("auto", "cpu", "cuda"), default="auto", example="cpu"),
    Flag(
        "--dtype",
        "NAME",
        "auto, float32, bfloat16 or float16 (also fp32, bf16, fp16). auto: the checkpoint's on CUDA, float32 on CPU.",
        values.choice(_DTYPES),
        default="auto",
        example="float32",
    ),
    Flag("--max-model-len", "TOKENS", "Longest sequence.", values.whole(1), default="the model's own", example="4096"),
    Flag("--max-num-seqs", "N", "Requests that run at the same time.", values.whole(1), default="64", example="64"),
    Flag(
        "--max-num-batched-tokens",
        "N",
        "Tokens computed in one step.",
        values.whole(1),
        default="2048",
        example="2048",
    ),
    Flag(
        "--kv-cache-memory",
        "SIZE",
        "KV cache of each rank, as 2GiB or 512MB.",
        values.size,
        default="what is free (CPU: half of it, shared)",
        example="2GiB",
    ),
    Flag(
        "--gpu-memory-utilization",
        "SHARE",
        "Of each GPU's memory, what all on it may hold together; what weights and work leave of it is KV cache.",
        values.share,
        default="0.9",
        example="0.8",
    ),
    Flag("--seed", "N", "Seed of everything that is random.", values.whole(0, 2**31 - 1), default="0", example="1"),
    Flag("--served-model-name", "NAME", "Model name in the API.", default="the model's", example="chat"),
    Flag("--host", "ADDRESS", "Address to listen on.", default="127.0.0.1", example="::1"),
    Flag("--port", "PORT", "TCP port; 0 takes a free one.", values.whole(0, 65535), default="8000", example="8000"),
    Flag(
        "--uds",
        "PATH",
        "Listen on this Unix socket instead of host and port.",
        values.socket_path,
        example="/run/chat.sock",
    ),
    Flag("--api-key", "KEY", "Key that clients must send. Others can see it in ps: prefer a file.", values.secret),
    Flag("--api-key-file", "FILE", "File of keys, one a line.", values.key_file, example="/etc/xserve/keys"),
    Flag("--ssl-keyfile", "FILE", "Private key (PEM) for HTTPS.", values.readable_file, example="key.pem"),
    Flag("--ssl-certfile", "FILE", "Certificate chain (PEM) for HTTPS.", values.readable_file, example="cert.pem"),
    Flag(
        "--ready-timeout",
        "SECONDS",
        "Give a start up after so long without progress.",
        values.seconds(0.1),
        default="600",
        example="600",
    ),
    Flag(
        "--shutdown-timeout",
        "SECONDS",
        "Time for a stop of the whole tree, running requests included.",
        values.seconds(0),
        default="30",
        example="30",
    ),
    Flag(
        "--watchdog-timeout",
        "SECONDS",
        "A process counts as hung after so long in one step, or without a sign of life; 0: never.",
        values.seconds(0),
        default="30",
        example="60",
    ),
    NAME,
    Flag(
        "--start-method",
        "NAME",
        "auto, fork, spawn or forkserver.",
        values.one_of("auto", "fork", "spawn", "forkserver"),
        default="auto",
        example="spawn",
    ),
    Flag(
        "--restart",
        "NAME",
        "What is done about a process that died: never, on-failure (once the tree has been ready) or always.",
        values.one_of("never", "on-failure", "always"),
        default="on-failure",
        example="never",
    ),
    Flag(
        "--max-restarts",
        "N",
        "Restarts of a process within the window; after that the tree ends, exit 125. 0 is --restart never.",
        values.whole(0),
        default="5",
        example="10",
    ),
    Flag(
        "--restart-window",
        "SECONDS",
        "The time over which restarts are counted.",
        values.seconds(1),
        default="600",
        example="3600",
    ),
    Flag(
        "--restart-backoff",
        "SECONDS",
        "The longest wait before a restart: the first comes at once, then after 1, 2, 4 … seconds up to this.",
        values.seconds(0),
        default="30",
        example="5",
    ),
    Flag(
        "--device-ids",
        "IDS",
        "Devices to use: numbers, UUIDs (they may be cut short) or MIG slices, as CUDA_VISIBLE_DEVICES takes them.",
        values.device_ids,
        default="the visible ones, in order",
        example="2,3",
        joint=",",
    ),
    Flag("--numa-bind", "", "Bind each worker to the CPUs and the memory of the node of its device.", kind="switch"),
    Flag(
        "--numa-bind-nodes",
        "NODES",
        "As --numa-bind, with these nodes: one for each worker, or one for all.",
        values.numbers,
        example="0,0,1,1",
        joint=",",
    ),
    Flag(
        "--numa-bind-cpus",
        "LISTS",
        "As --numa-bind, with these CPUs: a list for each worker, or one for all.",
        values.cpu_lists,
        example="0-3/4-7",
        joint="/",
    ),
    Flag(
        "--env",
        "NAME=VALUE",
        "A variable for engine cores and workers; can be repeated.",
        values.pair,
        kind="repeated",
        example="NCCL_DEBUG=INFO",
    ),
    CONFIG,
    Flag(
        "--ring-bytes",
        "SIZE",
        "Shared memory for the calls of an engine core to its workers; pages are taken as they are used.",
        values.size,
        default="16MiB",
        example="64MiB",
    ),
    Flag(
        "--log-level",
        "NAME",
        "debug, info, warning, error or critical.",
        values.one_of(*LEVELS),
        default="info",
        example="info",
    ),
)

TIMEOUT = Flag(
    "--timeout",
    "SECONDS",
    "Time that the tree gets to stop.",
    values.seconds(0),
    default="the launch's --shutdown-timeout",
    example="30",
)
HELP = Flag("--help", "", "Show this and exit.", aliases=("-h",), kind="switch")
KEY_FILE = Flag(
    "--file", "FILE", "The file to write; it must not be there yet.", example="cluster.key", positional=True
)
VERSION = Flag("--version", "", "Print the version and exit.", kind="switch")

COMMANDS: dict[str, tuple[Flag, ...]] = {
    "launch": LAUNCH,
    "plan": (*LAUNCH, JSON),
    "doctor": (*LAUNCH, JSON),
    "status": (NAME, JSON),
    "stop": (NAME, TIMEOUT),
    "keygen": (KEY_FILE,),
}
"""Every command with its flags; `--help` is everywhere."""

LATER = frozenset(
    # Words rather than a list of twenty strings.
    """--pp -pp --pipeline-parallel-size --dp -dp --data-parallel-size --headless --api-server-count -asc
    --enable-expert-parallel -ep --log-format --log-dir""".split()  # noqa: SIM905
)
"""Flags that people know from elsewhere and that this version does not have: said so, instead of a wrong guess."""
