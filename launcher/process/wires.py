"""The supervisor's own lines to every process of the tree: what it prints, and (workers) what it reports.

For each process one *output pipe* (its fds 1 and 2; read here), and for each worker one *status line*, a channel that
mirrors what it reports to its engine core. The supervisor holds the reading ends itself, so that a dead engine core
takes no worker's last words with it. The other ends travel: to a direct child with its birth message, to a worker
through its engine core, which hands them on and closes its copies. EOF on either = every holder is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from launcher.process import channel
from launcher.process.reports import UpMessage
from launcher.process.spec import ProcessSpec

_CHUNK = 1 << 16


class Output(Protocol):
    """Takes what processes print."""

    def feed(self, title: str, pid: int, data: bytes) -> None: ...
    def finish(self, title: str, pid: int) -> None: ...
    def tail(self, title: str) -> tuple[str, ...]: ...


class Wires:
    """`pid_of`: the pid of a title, 0 while it is not known (its output then waits in the pipe)."""

    def __init__(self, output: Output, pid_of: Callable[[str], int]) -> None:
        self._output = output
        self._pid_of = pid_of
        self._outputs: dict[int, str] = {}
        self._status: dict[int, tuple[str, channel.ParentChannel]] = {}

    def lay(self, spec: ProcessSpec) -> tuple[dict[str, int], list[int]]:
        """Lines for a process and its children: the descriptors for its birth message, by name, to be closed here
        (second value) once they have travelled."""
        names = {"output": self._output_pipe(spec.title)}
        for child in spec.children:
            names[f"child:{child.title}:output"] = self._output_pipe(child.title)
            names[f"child:{child.title}:status"] = self._status_line(child.title)
        return names, list(names.values())

    def _output_pipe(self, title: str) -> int:
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        self._outputs[read] = title
        return write

    def _status_line(self, title: str) -> int:
        parent, child = channel.pair()
        line = channel.parent_end(parent)
        self._status[line.fileno()] = (title, line)
        return child.detach()

    def drop(self, titles: Collection[str]) -> None:
        """These processes are gone: read what they have left in their pipes, then close their lines."""
        for fd in [fd for fd, title in self._outputs.items() if title in titles]:
            self._close_output(fd)
        for fd in [fd for fd, (title, _) in self._status.items() if title in titles]:
            self._status.pop(fd)[1].close()

    def fds(self) -> Iterator[int]:
        """To be polled for reading. A worker speaks for the first time when its engine core has told its pid: what it
        says before that waits."""
        for fd, (title, _) in self._status.items():
            if self._pid_of(title):
                yield fd
        for fd, title in self._outputs.items():
            if self._pid_of(title):
                yield fd

    def read(self, fd: int) -> list[tuple[str, UpMessage | None]]:
        """What a readable descriptor brought: (title, message); message None: that process let go of its line."""
        if fd in self._outputs:
            self._read_output(fd)
            return []
        if fd in self._status:
            return self._read_status(fd)
        return []

    def _read_output(self, fd: int) -> None:
        title = self._outputs[fd]
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        if data:
            self._output.feed(title, self._pid_of(title), data)
            return
        del self._outputs[fd]
        os.close(fd)
        self._output.finish(title, self._pid_of(title))

    def _read_status(self, fd: int) -> list[tuple[str, UpMessage | None]]:
        title, line = self._status[fd]
        news: list[tuple[str, UpMessage | None]] = []
        while True:
            try:
                got = line.recv_nowait()
            except EOFError:
                del self._status[fd]
                line.close()
                return [*news, (title, None)]
            if got is None:
                return news
            for extra in got[1]:
                os.close(extra)  # reports carry none
            news.append((title, got[0]))

    def close(self) -> None:
        self.drop({*self._outputs.values(), *(title for title, _ in self._status.values())})

    def _close_output(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            while fd in self._outputs and select.select([fd], [], [], 0)[0]:
                self._read_output(fd)
        if fd in self._outputs:  # somebody who is none of ours still holds the other end
            title = self._outputs.pop(fd)
            self._output.finish(title, self._pid_of(title))
            os.close(fd)
