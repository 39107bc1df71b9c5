"""One end of the control line in a process of its own, to be stopped and killed: tells its events on stdout.

python -m tests.nodes.one_end leader|follower PORT
"""

from __future__ import annotations

import select
import subprocess
import sys

from launcher.clock import now
from launcher.nodes.follower import Follower
from launcher.nodes.leader import Leader
from tests.nodes.parties import group, settings

SILENCE = 2.0


def main(role: str, port: int) -> None:
    given = {"silence_limit": SILENCE}
    end: Leader | Follower
    if role == "leader":
        end = Leader(settings(0, port, **given), "launch", "1")
        end.open_group(group(3))
    else:
        end = Follower(settings(1, port, **given), "owner1", "1", "host1")
    while True:
        for event in end.pump(now()):
            print(type(event).__name__, event, flush=True)
        poll = select.poll()
        for fd in end.fds():
            poll.register(fd, select.POLLIN)
        poll.poll(end.until_timer(now()) * 1000)


class OneEnd:
    """Such a process, started; `lines` are what it has told."""

    def __init__(self, role: str, port: int) -> None:
        command = [sys.executable, "-m", "tests.nodes.one_end", role, str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._text = b""

    def lines(self) -> list[str]:
        """Never blocks."""
        assert self.process.stdout is not None
        while select.select([self.process.stdout], [], [], 0)[0]:
            data = self.process.stdout.read1(65536)  # type: ignore[union-attr]
            if not data:
                break
            self._text += data
        return self._text.decode().splitlines()

    def told(self, kind: str) -> list[str]:
        return [line for line in self.lines() if line.startswith(kind + " ")]

    def close(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
