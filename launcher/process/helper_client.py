"""The supervisor's side of its helper (see `helper`): start it, have it fork, tell it whom to guard."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from launcher.errors import Failure
from launcher.process.helper import HelperSettings
from launcher.process.nursery import Child, Nursery
from launcher.process.reports import DownMessage, Fork, Guard, ReadyReport, StepReport, Stop, Unguard
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


class Helper:
    """One helper after the other. Its death is no failure of the tree once the tree is up: it is started again, and
    nobody waits for it but a core that is to be forked from it."""

    def __init__(self, spec: ProcessSpec, wires: Wires, lock_fd: int | None) -> None:
        self._spec = spec
        self._wires = wires
        self._lock_fd = lock_fd
        self._nursery = Nursery("spawn")
        self._sessions: dict[int, int] = {}
        self._was_ready = False
        self.warm = spec.role == "forkserver"
        """Whether cores can be forked from it."""
        self.failure: Failure | None = None
        """Set when it died before it was ready for the first time."""
        self.on_step: Callable[[str, int, StepReport], None] = lambda *_: None
        self.on_ready: Callable[[dict[str, Any]], None] = lambda _: None

    @property
    def pid(self) -> int:
        return self._nursery.children[-1].pid if self._nursery.children else 0

    @property
    def is_ready(self) -> bool:
        return bool(self._nursery.children) and self._nursery.children[-1].is_ready

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
                self._was_ready = True
                self.on_ready(message.info)
            elif message is None and child.failure is not None:
                self._died(child)

    def _died(self, child: Child) -> None:
        if not child.is_ready and self.failure is None and not self._was_ready:
            self.failure = child.failure
            return
        self._nursery.forget(child)
        if not child.is_ready:
            # It was up once and does not come up again: from now on it only guards, and cores come by exec.
            self.warm = False
            settings = msgspec.msgpack.decode(self._spec.payload, type=HelperSettings)
            payload = msgspec.msgpack.encode(msgspec.structs.replace(settings, preload=()))
            self._spec = msgspec.structs.replace(self._spec, payload=payload)
        self.start()

    # --- requests

    def fork(self, sock: socket.socket) -> None:
        """`nursery.Forker`"""
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
