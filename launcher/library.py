"""`Engine`: the same executors and guarantees in the caller's own process, for scripts and notebooks.

    from launcher import Engine

    with Engine(model="path/to/model", tp=2) as engine:
        for answer in engine.generate(["Once upon a time"], max_tokens=32, temperature=0):
            print(answer.text)

No supervisor, no HTTP: the caller's process is the engine core and the workers are its children. It installs no signal
handlers and becomes no subreaper. Workers end with `close`, at exit, and when the caller's process dies in any way.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from launcher import envs
from launcher.api.detokenize import Detokenizer, StopStrings
from launcher.api.tokenizer import Tokenizer, load_tokenizer
from launcher.clock import Deadline
from launcher.config import EngineSettings, LaunchConfig, WorkerSettings
from launcher.control import run_dir
from launcher.engine.core import EngineCore
from launcher.engine.messages import AddRequest, EngineInfo, RequestOutput
from launcher.errors import ChildFailedError, ClosedError, UsageError
from launcher.executor.base import Executor, SamplingParams, TokenLogprobs, pack, resolve_executor, unpack
from launcher.host import read_host
from launcher.host.process_state import needs_exec, unsafe_to_fork
from launcher.plan.plan import make_plan
from launcher.process import child, sessions
from launcher.process.guardian import Guardian
from launcher.process.helper import HelperSettings
from launcher.process.nursery import Child
from launcher.process.spec import ProcessSpec

log = logging.getLogger(__name__)
_numbers = itertools.count()
_GUARD_HINT = (
    "Engine(...) was called again by a worker process that imports {path}, where its class is defined.\n"
    "Put the code that starts the engine under: if __name__ == '__main__':"
)
Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""Text, token ids, or chat messages (``[{"role": …, "content": …}]``)."""


class MainGuardError(UsageError, SystemExit):
    """A script without a ``__main__`` guard started itself again in a worker. Uncaught, it prints two lines only."""

    def __init__(self, path: str) -> None:
        super().__init__(_GUARD_HINT.format(path=path))
        self.code = str(self)


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    """``stop``, ``length`` or ``error``."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str = ""


class Engine:
    """An engine in the caller's process tree. One call at a time; other threads' calls wait their turn."""

    def __init__(
        self,
        model: str | None = None,
        *,
        tp: int = 1,
        worker: str | type[Any] | None = None,
        start_method: Literal["auto", "fork", "spawn"] = "auto",
        **options: Any,
    ) -> None:
        """`options`: any other field of `launcher.config.LaunchConfig` (dtype, max_model_len, kv_cache_memory, …).

        Returns when every rank is ready. Raises UsageError and HostError before a process is started,
        ChildFailedError with the first cause when one fails to start; nothing is left running then.
        """
        if child.importing_main:
            raise MainGuardError(child.importing_main)
        self._lock = threading.RLock()
        self._executor: Executor | None = None
        self._guardian: Guardian | None = None
        self._sessions: dict[int, int] = {}
        name = worker if isinstance(worker, str | None) else f"{worker.__module__}:{worker.__qualname__}"
        method = choose_method(start_method, options.get("env"))
        config = _config(dict(options, model=model, tp=tp, worker=name, start_method=method))
        self._close = contextlib.ExitStack()
        try:
            self._start(config, method)
        except BaseException as error:
            self._close.close()
            if isinstance(error, ChildFailedError) and MainGuardError.__name__ in error.cause.traceback:
                raise MainGuardError(_main_path()) from None
            raise
        self._at_exit = _close_at_exit(self)

    def _start(self, config: LaunchConfig, method: Literal["fork", "spawn"]) -> None:
        directory = run_dir.claim(f"engine-{os.getpid()}-{next(_numbers)}")
        self._close.callback(directory.remove)
        directory.forget()  # the directory is swept if we die; it is no instance that one could ask for its status
        launch_id = uuid.uuid4().hex
        plan = make_plan(
            config, read_host(), run_dir=directory.path, launch_id=launch_id, name=directory.name, api=False
        )
        [core] = plan.processes
        settings = msgspec.msgpack.decode(core.payload, type=EngineSettings)
        self._close.callback(self._end_strays, launch_id)
        self._executor = _make_executor(settings, [_with_main(spec, method) for spec in core.children], method)
        self._close.callback(self._executor.shutdown, settings.shutdown_timeout)
        self._guard(directory, launch_id)  # after the forks, which want this process without other children's ends
        self._core = EngineCore(self._executor, settings)
        self.info: EngineInfo = self._core.initialize()
        self.tokenizer: Tokenizer = load_tokenizer(settings.worker.model)
        self._seed = settings.seed

    def _guard(self, directory: run_dir.RunDirectory, launch_id: str) -> None:
        """Have somebody end what the workers start, should this process be killed."""
        workers: list[Child] = getattr(self._executor, "children", [])
        self._sessions = {worker.pid: worker.start_time for worker in workers}
        if not workers:
            return
        helper = HelperSettings(clean_up=run_dir.REMOVE_LEFT, run_dir=str(directory.path), launch_id=launch_id)
        self._guardian = Guardian(helper, envs.child_environment(), directory.lock_fd)
        self._guardian.guard(self._sessions)

    def _end_strays(self, launch_id: str) -> None:
        """The workers are gone: end what they had started, and dismiss the guard."""
        spare = {self._guardian.pid} if self._guardian is not None else set()
        sessions.kill_members(self._sessions, launch_id, Deadline.after(1.5), spare)
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> list[Completion]:
        """Answers in the order of the prompts. `sampling`: fields of `SamplingParams`, unless `params` is given.

        Raises ChildFailedError when a worker dies, ClosedError after `close`.
        """
        if isinstance(prompts, str):
            raise UsageError(f"generate({prompts[:20]!r}): prompts is a list, also of one: generate([prompt])")
        params = params if params is not None else _sampling(sampling)
        with self._lock:
            core = self._open_core()
            texts = [self._tokens(prompt) for prompt in prompts]
            answers = {}
            try:
                for index, tokens in enumerate(texts):
                    key = f"request-{next(_numbers)}"
                    seed = params.seed or (self._seed << 20) + index
                    request = AddRequest(key, pack(tokens), msgspec.structs.replace(params, seed=seed))
                    answers[key] = _Answer(tokens, self.tokenizer, stop)
                    core.add_request(request)
                self._run(core, answers)
            finally:
                core.abort(answers)  # those that are still running: an interrupt, or a failure
            return [answer.completion() for answer in answers.values()]

    def _run(self, core: EngineCore, answers: dict[str, _Answer]) -> None:
        while not all(answer.finish_reason for answer in answers.values()):
            for key, output in core.step():
                answer = answers[key]
                answer.take(output)
                if answer.stopped_by_text and output.finish_reason is None:
                    core.abort([key])

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if prompt and isinstance(prompt[0], dict):
            text = self.tokenizer.render_chat([m for m in prompt if isinstance(m, dict)], {})
            return self.tokenizer.encode(text, special=False)
        return [token for token in prompt if isinstance(token, int)]

    def collective_rpc(self, method: str | Callable[..., Any], args: tuple[Any, ...] = (), **options: Any) -> Any:
        """Call a worker method, or ``method(worker, *args)``, on every rank; see `Executor.collective_rpc`."""
        with self._lock:
            self._open_core()
            assert self._executor is not None
            return self._executor.collective_rpc(method, args, **options)

    def _open_core(self) -> EngineCore:
        if self._executor is None:
            raise ClosedError("this engine is closed")
        return self._core

    def close(self) -> None:
        """End the workers and remove every trace. Idempotent."""
        with self._lock:
            self._executor = None
            self._close.close()
            atexit.unregister(self._at_exit)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Answer:
    """Tokens and text of one prompt as they come."""

    def __init__(self, prompt: list[int], tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._prompt = prompt
        self._detokenizer = Detokenizer(tokenizer.decode)
        self._stops = StopStrings(list(stop))
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text = ""
        self._error = ""
        self.finish_reason = ""
        self.stopped_by_text = False

    def take(self, output: RequestOutput) -> None:
        for place, token in enumerate(unpack(output.new_token_ids)):
            if self.stopped_by_text:
                return
            self._tokens.append(token)
            self._logprobs += output.logprobs[place : place + 1]
            if token != output.stop_token_id:  # the token that ended it is delivered, but is no text
                self._push(self._detokenizer.push(token))
        if output.finish_reason is not None and not self.stopped_by_text:
            self._push(self._detokenizer.flush())
            self.finish_reason, self._error = self.finish_reason or output.finish_reason, output.error
            if not self.stopped_by_text:
                self._text += self._stops.flush()

    def _push(self, text: str) -> None:
        given, self.stopped_by_text = self._stops.feed(text)
        self._text += given
        if self.stopped_by_text:
            self.finish_reason = "stop"

    def completion(self) -> Completion:
        return Completion(self._prompt, self._tokens, self._text, self.finish_reason, self._logprobs, self._error)


def choose_method(
    asked: Literal["auto", "fork", "spawn"], env: Mapping[str, str] | None = None
) -> Literal["fork", "spawn"]:
    """How the caller's process starts workers: fork where that is safe, else spawn, with a line that says why.
    `env`: variables for the workers.

    Raises UsageError for ``fork`` where it is not safe, with all the reasons.
    """
    if asked not in ("auto", "fork", "spawn"):
        raise UsageError(f"start_method {asked!r} is none of auto, fork, spawn")
    reasons = [*unsafe_to_fork(), *(f"{name} takes effect at an exec only" for name in needs_exec(dict(env or {})))]
    if asked == "auto" and reasons:
        log.warning("using spawn: %s", "; ".join(reasons))
    if asked == "fork" and reasons:
        raise UsageError(f"start method fork is not safe in this process: {'; '.join(reasons)}; use spawn or auto")
    return "spawn" if reasons or asked == "spawn" else "fork"


def _config(options: dict[str, Any]) -> LaunchConfig:
    unknown = sorted(set(options) - set(LaunchConfig.__struct_fields__))
    if unknown:
        known = ", ".join(LaunchConfig.__struct_fields__)
        raise UsageError(f"Engine: unknown option {', '.join(unknown)}; there are {known}")
    origins = {name: f"Engine({name}=…)" for name, value in options.items() if value is not None}
    try:
        return msgspec.convert(options | {"origins": origins}, LaunchConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"Engine: {error}") from None


def _sampling(options: dict[str, Any]) -> SamplingParams:
    unknown = set(options) - set(SamplingParams.__struct_fields__)
    if unknown:
        known = ", ".join(SamplingParams.__struct_fields__)
        raise UsageError(f"generate: unknown option {', '.join(sorted(unknown))}; there are stop, {known}")
    return SamplingParams(**options)


def _make_executor(settings: EngineSettings, specs: list[ProcessSpec], method: Literal["fork", "spawn"]) -> Executor:
    made: Callable[..., Executor] = resolve_executor(settings.backend)
    return made(settings, specs=specs, method=method) if specs else made(settings)


def _with_main(spec: ProcessSpec, method: Literal["fork", "spawn"]) -> ProcessSpec:
    """A class of the caller's script is found by a spawned worker only if it imports that script."""
    settings = msgspec.msgpack.decode(spec.payload, type=WorkerSettings)
    if method == "fork" or not any(
        (n or "").startswith("__main__:") for n in (settings.worker, settings.worker_extension)
    ):
        return spec
    return msgspec.structs.replace(spec, main_path=_main_path())


def _main_path() -> str:
    path: str | None = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        raise UsageError("a worker class of an interactive session cannot be started by spawn: put it into a module")
    return os.path.abspath(path)


def _close_at_exit(engine: Engine) -> Callable[[], None]:
    """A forgotten engine is closed in order when the interpreter ends, and does not live for that alone."""
    reference = weakref.ref(engine)

    def close() -> None:
        if (alive := reference()) is not None:
            alive.close()

    atexit.register(close)
    return close
