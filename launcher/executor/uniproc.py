"""`uni`: the one worker lives in this process. No queue, no child: the reference that `mp` is compared with.

Calls run at once, in the caller's thread; a future is settled when it is handed out. Errors are the same kinds as with
`mp`: what the worker raises in a call becomes a `RemoteError` with its traceback. While starting there is no call, and
its exceptions come as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.config import EngineSettings
from launcher.errors import ClosedError, UsageError
from launcher.executor.base import Executor
from launcher.process.reports import Step
from launcher.worker.classes import worker_class
from launcher.worker.rpc import error_reply, invoke, remote_error

if TYPE_CHECKING:
    from launcher.process.child import ChildContext

_TITLE = "worker in this process"


class _Settled:
    """A future that has its outcome."""

    __slots__ = ("_error", "_value")

    def __init__(self, value: Any, error: BaseException | None) -> None:
        self._value = value
        self._error = error

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:  # noqa: ARG002 - nothing to wait for
        if self._error is not None:
            raise self._error
        return self._value


class UniProcExecutor(Executor):
    """See the module. World size 1 only."""

    def __init__(self, settings: EngineSettings, ctx: ChildContext | None = None) -> None:
        super().__init__(settings, ctx)
        if self.world_size != 1:
            raise UsageError(f"backend uni runs one rank, and {self.world_size} are asked for; use --backend mp")
        self._worker: Any = None
        self._closed = False

    def start(self) -> None:
        self._strike("init")
        settings = self.settings.worker
        self._enter(Step.IMPORT, settings.worker)
        worker = worker_class(settings)(settings)
        if self.ctx is not None:
            worker.progress = self.ctx.progress
        self._enter(Step.DEVICE, settings.device)
        worker.init_device()
        self._enter(Step.MODEL, settings.model or "")
        worker.load_model()
        self._worker = worker

    def _enter(self, step: Step, detail: str) -> None:
        if self.ctx is not None:
            self.ctx.enter(step, detail)

    def submit(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,  # noqa: ARG002 - a call in one's own thread can't be left alone
        unique_reply_rank: int | None = None,
    ) -> _Settled:
        if self._closed or self._worker is None:
            raise ClosedError("the executor is not running: call start() first, and nothing after shutdown()")
        if unique_reply_rank not in (None, 0):
            raise UsageError(f"unique_reply_rank={unique_reply_rank}: there is rank 0 only")
        try:
            value = invoke(self._worker, method, tuple(args), kwargs or {})
        except (Exception, SystemExit) as error:
            reply = error_reply(0, error)
            failure = remote_error(reply, title=_TITLE, rank=0)
            failure.__cause__ = error
            return _Settled(None, failure)
        return _Settled(value if unique_reply_rank == 0 else [value], None)

    def watch_fds(self) -> list[int]:
        return []

    def raise_if_dead(self) -> None:
        """A worker in this process can't be gone."""

    def shutdown(self, budget: float) -> list[str]:  # noqa: ARG002 - a method in one's own thread can't be cut short
        if self._closed:
            return []
        self._closed = True
        self._strike("cleanup")
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()
        return []
