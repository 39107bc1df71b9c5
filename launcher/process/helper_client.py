"""The supervisor's side of its helper (see `helper`): start it, have it fork, tell it whom to guard."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from launcher import clock
from launcher.errors import Failure, ForkerLostError
from launcher.process import procfs
from launcher.process.helper import HelperSettings
from launcher.process.nursery import Child, Nursery
from launcher.process.oom import OomWatch
from launcher.process.reports import DownMessage, Fork, Guard, Ping, Pong, ReadyReport, StepReport, Stop, Unguard
from launcher.process.spec import ChildMethod, ProcessSpec
from launcher.process.wires import Wires


def helper_spec(method: ChildMethod, settings: HelperSettings, environment: Mapping[str, str]) -> ProcessSpec:
    """With fork and spawn it is only a guard."""
    warm = method == "forkserver"
    return ProcessSpec(
        title="Forkserver" if warm else "Guard",
        comm="xs:forkserver" if warm else "xs:guard",
        role="forkserver" if warm else "guard",
        target="launcher.process.helper:run",
        env=dict(environment),
        payload=msgspec.msgpack.encode(settings if warm else msgspec.structs.replace(settings, preload=())),
        launch_id=settings.launch_id,
    )


_TRIES = 3
"""Helpers in a row that die before they are ready, after which the next one only guards."""


class Helper:
    """One helper after the other. Its death is no failure of the tree once the tree is up: it is started again, and
    nobody waits for it but a core that is to be forked from it. `retry`: this holds for a first start, too.
    """

    def __init__(
        self, spec: ProcessSpec, wires: Wires, lock_fd: int | None, *, retry: bool = False, oom: OomWatch | None = None
    ) -> None:
        self._spec = spec
        self._wires = wires
        self._lock_fd = lock_fd
        self._nursery = Nursery("spawn", oom=oom)
        self._sessions: dict[int, int] = {}
        self._has_returns = retry
        self._failed_starts = 0
        self._given_up: Child | None = None
        self.warm = spec.role == "forkserver"
        """Whether cores can be forked from it."""
        self.failure: Failure | None = None
        """Set when it died before it was ready for the first time."""
        self.on_step: Callable[[str, int, StepReport], None] = lambda *_: None
        self.on_ready: Callable[[dict[str, Any]], None] = lambda _: None
        self.on_pong: Callable[[], None] = lambda: None
        self.on_death: Callable[[Failure], None] = lambda _: None
        """It died, and another one is being started."""

    @property
    def pid(self) -> int:
        return self._nursery.children[-1].pid if self._nursery.children else 0

    @property
    def is_ready(self) -> bool:
        """It is up, and is not about to be replaced."""
        child = self._nursery.children[-1] if self._nursery.children else None
        return child is not None and child.is_ready and not child.is_gone and child is not self._given_up

    @property
    def title(self) -> str:
        return self._spec.title

    def start(self) -> None:
        self._wires.drop({self._spec.title})  # of one that died
        names, ours = self._wires.lay(self._spec)
        if self._lock_fd is not None:
            names["lock"] = self._lock_fd
        try:
            self._nursery.start_all([self._spec], descriptors={self._spec.title: names})
        finally:
            for fd in ours:
                os.close(fd)
        self.guard(self._sessions)

    def fileno(self) -> int:
        return self._nursery.fileno()

    def owns(self, pid: int) -> bool:
        return any(child.pid == pid and child.exit is None for child in self._nursery.children)

    def pump(self) -> None:
        """Read what it says; start it again if it died while the tree was up."""
        for child, message in self._nursery.pump():
            if isinstance(message, StepReport):
                self.on_step(child.title, child.pid, message)
            elif isinstance(message, ReadyReport):
                self._has_returns = True
                self._failed_starts = 0
                self.on_ready(message.info)
            elif isinstance(message, Pong):
                self.on_pong()
            elif message is None and child.failure is not None:
                self._died(child)

    def _died(self, child: Child) -> None:
        assert child.failure is not None
        self._failed_starts += not child.is_ready
        if not self._has_returns:
            self.failure = self.failure or child.failure
            return
        self._nursery.forget(child)
        self.on_death(child.failure)
        if self._failed_starts >= _TRIES and self.warm:
            # It does not come up: from now on it only guards, and cores come by exec.
            self.warm = False
            settings = msgspec.msgpack.decode(self._spec.payload, type=HelperSettings)
            payload = msgspec.msgpack.encode(msgspec.structs.replace(settings, preload=()))
            self._spec = msgspec.structs.replace(self._spec, payload=payload)
        self.start()

    def replace(self, why: str) -> None:
        """It is hung: kill it; its death starts another one."""
        child = self._nursery.children[-1] if self._nursery.children else None
        if child is None or child is self._given_up or child.is_gone:
            return
        self._given_up = child
        child.failure = child.failure or Failure(
            title=child.title,
            role=child.spec.role,
            kind="timeout",
            headline=why,
            step=child.step,
            pid=child.pid,
            at=clock.now(),
        )
        child.signal(signal.SIGKILL)

    @property
    def idle_start(self) -> float:
        """Seconds without a sign of progress of one that is not ready yet; 0 when it is."""
        child = self._nursery.children[-1] if self._nursery.children else None
        return 0.0 if child is None or child.is_ready or child.is_gone else clock.now() - child.last_progress

    # --- requests

    def ping(self, number: int) -> None:
        for child in self._nursery.children:
            self._nursery.send_nowait(child, Ping(number=number))

    def fork(self, sock: socket.socket) -> None:
        """`nursery.Forker`. Raises ForkerLostError when it can be seen beforehand that nothing will come of it."""
        stat = procfs.read_stat(self.pid)
        if stat is None or stat.state in "TtZ":
            raise ForkerLostError(f"the helper cannot fork: {'gone' if stat is None else f'in state {stat.state}'}")
        self._tell(Fork(parent_pid=os.getpid()), [sock.fileno()])

    def guard(self, sessions: Mapping[int, int]) -> None:
        """These sessions (leader's pid → start time) must end with the supervisor."""
        self._sessions |= sessions
        self._tell(Guard(sessions=dict(sessions)))

    def unguard(self, pid: int) -> None:
        self._sessions.pop(pid, None)
        self._tell(Unguard(pid=pid))

    def _tell(self, message: DownMessage, fds: Sequence[int] = ()) -> None:
        for child in self._nursery.children:
            self._nursery.send(child, message, fds)

    def close(self) -> None:
        """Dismiss and reap it."""
        with contextlib.suppress(OSError):
            self._tell(Stop(budget=1))
            self._nursery.stop(1.0)
        self._nursery.close()
