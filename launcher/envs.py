"""The environment: the only file that reads `os.environ`, and the table of everything that it reads.

Values are read when asked for, never at import, so that a test or a library user who sets a variable is heard. A bad
value is a `UsageError` that names the variable and the value. Nobody writes `os.environ` but `process/child.py`, in
the child, before its target is imported.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

from launcher.errors import UsageError

Kind = Literal["text", "path", "absolute path", "integer", "switch", "flag value"]


class Variable(NamedTuple):
    """One row of the table."""

    name: str
    kind: Kind
    default: str
    doc: str
    inherited: bool = True
    """False: taken out of every child's environment."""


VARIABLES: tuple[Variable, ...] = (
    Variable("XSERVE_<FLAG>", "flag value", "", "value of --<flag> when the command line does not give it"),
    Variable("XSERVE_API_KEY", "flag value", "", "as --api-key; children get it in their settings only", False),
    Variable("XSERVE_CACHE_DIR", "path", "$XDG_CACHE_HOME/xserve", "converted and downloaded models"),
    Variable("XSERVE_FAULT", "text", "", "faults of the reference worker: kind:rank[:seconds][@step][,once];…"),
    Variable("XSERVE_LAUNCH_ID", "text", "", "set by xserve in every process of a launch; finds strays"),
    Variable("XDG_CACHE_HOME", "absolute path", "~/.cache", "caches of this user"),
    Variable("XDG_STATE_HOME", "absolute path", "~/.local/state", "crash bundles, when systemd gives no directory"),
    Variable("STATE_DIRECTORY", "absolute path", "", "crash bundles, given by systemd"),
    Variable("XDG_RUNTIME_DIR", "absolute path", "", "run directories, when systemd gives none"),
    Variable("RUNTIME_DIRECTORY", "absolute path", "", "the run directory, given by systemd"),
    Variable("CREDENTIALS_DIRECTORY", "absolute path", "", "secrets, given by systemd"),
    Variable("HOME", "absolute path", "the passwd entry's", "where ~ points"),
    Variable("NOTIFY_SOCKET", "text", "", "systemd's readiness socket: a path, or @name", False),
    Variable("WATCHDOG_PID", "text", "", "systemd's watchdog; the supervisor's alone", False),
    Variable("WATCHDOG_USEC", "integer", "", "systemd's watchdog; the supervisor's alone", False),
    Variable("LISTEN_FDS", "integer", "", "systemd's sockets; the supervisor's alone", False),
    Variable("LISTEN_FDNAMES", "text", "", "systemd's sockets; the supervisor's alone", False),
    Variable("LISTEN_PID", "text", "", "systemd's sockets; the supervisor's alone", False),
    Variable("LISTEN_PIDFDID", "text", "", "systemd's sockets; the supervisor's alone", False),
    Variable("OMP_NUM_THREADS", "integer", "CPUs / local workers", "threads of each worker; wins over our budget"),
    Variable("CUDA_VISIBLE_DEVICES", "text", "all", "GPUs that a launch may use"),
    Variable("TORCH_SYMM_MEM_DISABLE_MULTICAST", "switch", "", "set by xserve: torch leaves NVLink multicast alone"),
    Variable("HF_HUB_OFFLINE", "switch", "", "never ask the model hub"),
    Variable("NO_COLOR", "switch", "", "any value: plain output"),
    Variable("TERM", "text", "", "not set or dumb: plain output"),
)
"""Everything that xserve itself reads. What libraries read (NCCL_*, HF_HOME …) passes through."""

_NOT_INHERITED = frozenset(v.name for v in VARIABLES if not v.inherited)
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})


def cache_dir() -> Path:
    """Where models are kept. Not created here; whoever creates it in the temporary directory must check its owner.

    Someone without a home (no HOME and no passwd entry: usual in containers) gets a directory of his uid's own.
    """
    if value := _text("XSERVE_CACHE_DIR"):
        return Path(value).expanduser().absolute()
    if base := _xdg("XDG_CACHE_HOME"):
        return base / "xserve"
    home = _home()
    if home is None:
        return Path(tempfile.gettempdir()) / f"xserve-{os.getuid()}" / "cache"
    return home / ".cache" / "xserve"


def state_dir() -> Path:
    """Where crash bundles are kept; not created here. As `cache_dir` for someone without a home."""
    if value := (_text("STATE_DIRECTORY") or "").split(":")[0]:
        return _absolute("STATE_DIRECTORY", value)
    if base := _xdg("XDG_STATE_HOME"):
        return base / "xserve"
    home = _home()
    if home is None:
        return Path(tempfile.gettempdir()) / f"xserve-{os.getuid()}" / "state"
    return home / ".local" / "state" / "xserve"


def flag_from_environment(flag: str) -> str | None:
    """The value of ``XSERVE_<FLAG>`` for a flag's name (``max-num-seqs`` or ``--max-num-seqs``); None when not set."""
    return os.environ.get("XSERVE_" + flag.lstrip("-").replace("-", "_").upper())


def fault_text() -> str:
    """The faults that the reference worker shall have; empty: none."""
    return _text("XSERVE_FAULT") or ""


def launch_id() -> str | None:
    """The launch that this process belongs to, if it is a child of one."""
    return _text("XSERVE_LAUNCH_ID")


def runtime_directory() -> Path | None:
    """systemd's run directory for this unit. A unit with several has them joined by colons; the first is ours."""
    value = (_text("RUNTIME_DIRECTORY") or "").split(":")[0]
    return _absolute("RUNTIME_DIRECTORY", value) if value else None


def xdg_runtime_dir() -> Path | None:
    return _xdg("XDG_RUNTIME_DIR")


def credentials_directory() -> Path | None:
    value = _text("CREDENTIALS_DIRECTORY")
    return _absolute("CREDENTIALS_DIRECTORY", value) if value else None


def notify_socket() -> str | None:
    """systemd's readiness socket: an absolute path, or ``@name`` in the abstract namespace."""
    value = _text("NOTIFY_SOCKET")
    if value and value[0] not in "/@":
        raise UsageError(f"NOTIFY_SOCKET={value!r} is neither an absolute path nor @name: unset it")
    return value


def omp_num_threads() -> int | None:
    """Threads that the user asked for. OpenMP allows a list (``4,2``), one number a nesting level: the first counts."""
    value = _text("OMP_NUM_THREADS")
    if value is None:
        return None
    first = value.split(",")[0].strip()
    if not (first.isascii() and first.isdigit()) or int(first) < 1:
        raise UsageError(f"OMP_NUM_THREADS={value!r} is not a number of threads: set it to 1 or more, or unset it")
    return int(first)


def cuda_visible_devices() -> str | None:
    """As it stands: None when not set, and the empty string (no GPU at all) is not None."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def multicast_is_off() -> bool:
    """Whether torch leaves NVLink multicast alone."""
    return _switch("TORCH_SYMM_MEM_DISABLE_MULTICAST")


def hf_hub_offline() -> bool:
    return _switch("HF_HUB_OFFLINE")


def no_color() -> bool:
    """https://no-color.org: present and not empty, whatever the value."""
    return bool(os.environ.get("NO_COLOR"))


def terminal() -> str:
    """The terminal's kind; empty when nobody says."""
    return _text("TERM") or ""


def child_environment() -> dict[str, str]:
    """A copy to build a child's environment from, without what is the supervisor's alone."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}


def not_inherited() -> frozenset[str]:
    """Names that a child forked without an exec must drop by itself."""
    return _NOT_INHERITED


def _text(name: str) -> str | None:
    """Empty counts as not set, as the shells' ``${NAME:-default}`` has it."""
    return os.environ.get(name) or None


def _absolute(name: str, value: str) -> Path:
    if not value.startswith("/"):
        raise UsageError(f"{name}={value!r} is not an absolute path: give one that starts with /, or unset it")
    return Path(value)


def _xdg(name: str) -> Path | None:
    """The XDG specification has relative paths ignored."""
    value = _text(name)
    return Path(value) if value and value.startswith("/") else None


def _switch(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise UsageError(f"{name}={os.environ[name]!r} is neither on nor off: set it to 1 or 0, or unset it")


def _home() -> Path | None:
    if (value := _text("HOME")) and value.startswith("/"):
        return Path(value)
    try:
        entry = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None
    return Path(entry) if entry.startswith("/") else None
