"""A supervisor over made-up trees, as a program: ``python -m tests.process.supervise JSON``.

Notes and what processes print go to stdout as they come; the last line is the outcome as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from launcher.process.helper import HelperSettings
from launcher.process.reports import StepReport
from launcher.process.restart import RestartSettings
from launcher.process.sd_notify import Notifier
from launcher.process.spec import ProcessSpec
from launcher.process.supervisor import Supervisor, SupervisorSettings


class Shown:
    """Output and Screen in one."""

    def on_step(self, title: str, pid: int, report: StepReport) -> None:
        pass

    def on_ready(self, title: str, pid: int) -> None:
        self.note(f"{title} is ready")

    def note(self, line: str) -> None:
        print(f"note: {line}", flush=True)

    def close(self) -> None:
        pass

    def feed(self, title: str, pid: int, data: bytes) -> None:
        for line in data.decode().splitlines():
            if "told" in line or "part" in line:
                print(f"{title}: {line}", flush=True)

    def finish(self, title: str, pid: int) -> None:
        pass

    def tail(self, title: str) -> tuple[str, ...]:
        return ()


def _spec(fields: dict[str, Any], launch_id: str) -> ProcessSpec:
    children = tuple(_spec(child, launch_id) for child in fields.pop("children", ()))
    return ProcessSpec(**fields, children=children, child_method="fork", launch_id=launch_id)


def main() -> None:
    asked = json.loads(sys.argv[1])
    launch_id = asked["launch_id"]
    shown = Shown()
    supervisor = Supervisor(
        [_spec(fields, launch_id) for fields in asked["specs"]],
        SupervisorSettings(
            method="fork",
            helper=HelperSettings(launch_id=launch_id),
            launch_id=launch_id,
            ready_timeout=asked.get("ready_timeout", 20),
            shutdown_timeout=asked.get("shutdown_timeout", 10),
            environment=dict(os.environ) | {"XSERVE_LAUNCH_ID": launch_id},
            watchdog_timeout=0,
            restart=RestartSettings(policy=asked.get("policy", "on-failure"), max_restarts=3, longest_delay=0.2),
        ),
        http=None,
        output=shown,
        screen=shown,
        notifier=Notifier(None),
    )
    outcome = supervisor.run()
    cause = outcome.cause
    said = {
        "code": outcome.exit_code,
        "cause": cause.title if cause else "",
        "headline": cause.headline if cause else "",
        "host": cause.host if cause else "",
        "others": [one.title for one in outcome.follow_ons],
        "threads": threading.active_count(),
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
