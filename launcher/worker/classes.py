"""Classes by dotted name, ``module:Class``, and the worker class that a worker's settings ask for."""

from __future__ import annotations

import importlib
from typing import Any

from launcher.config import WorkerSettings
from launcher.errors import UsageError

PROTOCOL = (
    "init_device",
    "load_model",
    "kv_cache_spec",
    "determine_available_memory",
    "initialize_from_config",
    "compile_or_warm_up_model",
    "execute_model",
    "sample_tokens",
    "check_health",
    "shutdown",
)
"""The methods that xserve itself calls; see `launcher.worker.base`."""


def import_class(name: str, what: str) -> type[Any]:
    """The class ``module:Class``; `what` ("worker", "executor") goes into the message.

    Raises `UsageError` for a name that is malformed, not there, or no class. An error *inside* the module propagates
    as it is: its traceback is what its author needs.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(
            f"{what} {name!r} is not of the form module:Class; write for example my_package.my_module:MyClass"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise  # the module is there; something that it imports is not
        raise UsageError(
            f"{what} {name!r}: there is no module {missing!r} on the Python path; "
            "install it, or put its directory on PYTHONPATH"
        ) from None
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise UsageError(f"{what} {name!r}: module {module_name!r} has no {attribute!r}") from None
    if not isinstance(found, type):
        raise UsageError(f"{what} {name!r} is a {type(found).__name__}, not a class")
    return found


def worker_class(settings: WorkerSettings) -> type[Any]:
    """The class to make the worker of: `settings.worker`, with `settings.worker_extension` mixed in.

    Any class with the methods of `PROTOCOL` will do. The extension's methods become callable by `collective_rpc`; it
    may not hide what the worker has. Raises `UsageError`, as `import_class` does.
    """
    base = import_class(settings.worker, "worker")
    missing = [name for name in PROTOCOL if not callable(getattr(base, name, None))]
    if missing:
        raise UsageError(
            f"worker {settings.worker!r} has no {', '.join(missing)}; derive it from launcher.worker.base:Worker, "
            "which has defaults for most, or add the methods"
        )
    if settings.worker_extension is None:
        return base
    extension = import_class(settings.worker_extension, "worker extension")
    own = [name for name in vars(extension) if not name.startswith("__")]
    hidden = sorted(name for name in own if hasattr(base, name))
    if hidden:
        raise UsageError(
            f"worker extension {settings.worker_extension!r} would hide {', '.join(hidden)} "
            f"of worker {settings.worker!r}; give these other names"
        )
    # Only new names, so where it stands in the order of resolution does not matter; behind is the humbler place.
    return type(base.__name__, (base, extension), {"__module__": base.__module__})
