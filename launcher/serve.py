"""Composition: a `LaunchConfig` becomes a plan, the plan a supervised tree, its end an exit code.

Order matters: everything that can refuse a launch in words (plan, run directory, HTTP socket, control socket) comes
before the first process is started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import uuid
from collections.abc import Callable, Iterator

from launcher import clock, envs, logs
from launcher.clock import Deadline
from launcher.config import LaunchConfig
from launcher.control import run_dir
from launcher.control.bundle import write_bundle
from launcher.control.protocol import (
    ErrorReply,
    InstanceStatus,
    ProcessStatus,
    Reply,
    Request,
    StatusReply,
    StatusRequest,
    StopReply,
    StopRequest,
)
from launcher.control.server import ControlServer
from launcher.errors import ChildFailedError, Failure, XserveError
from launcher.host import read_host
from launcher.plan.plan import LaunchPlan, make_plan
from launcher.plan.processes import of_generation
from launcher.plan.show import to_json
from launcher.process import kernel, listen
from launcher.process.helper import HelperSettings
from launcher.process.lifecycle import State
from launcher.process.restart import RestartSettings
from launcher.process.sd_notify import Notifier
from launcher.process.supervisor import Outcome, Screen, Supervisor, SupervisorSettings
from launcher.process.tree import Tree

log = logging.getLogger(__name__)


Story = Callable[[Failure, tuple[Failure, ...]], str]
"""A failure for a reader."""


def serve(config: LaunchConfig, screen: Callable[[logs.LineWriter], Screen], story: Story) -> int:
    """Run a launch to its end; the exit code (0, 130, 143).

    `screen` makes the view of the start, given the writer that owns stderr; `story` tells of a failure that is
    followed by a restart. Raises UsageError and HostError before
    anything is started, ChildFailedError with the first cause when the tree fails.
    """
    _open_standard_fds()
    facts = read_host()
    _raise_file_limit()
    launch_id = uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        directory = run_dir.claim(config.name)
        stack.callback(directory.remove)
        plan = make_plan(config, facts, run_dir=directory.path, launch_id=launch_id, name=directory.name)
        http, url = stack.enter_context(_listening(plan))
        directory.record(launch_id=launch_id, url=url)
        writer = logs.LineWriter(2)
        stack.callback(lambda: writer.drain(Deadline.after(2)))
        logs.setup(config.log_level, "Supervisor", sink=writer.write)
        notifier = Notifier(envs.notify_socket())
        stack.callback(notifier.close)
        view = screen(writer)
        stack.callback(view.close)
        for note in plan.notes:
            view.note(note)
        _name_supervisor()
        output = logs.OutputRelay(writer.write)
        supervisor = Supervisor(
            plan.processes,
            _settings(config, plan, url, directory.lock_fd, _Keeper(plan, output, story)),
            http=http,
            output=output,
            screen=view,
            notifier=notifier,
        )
        control = ControlServer(directory.control_socket, _Control(supervisor, plan, url))
        stack.callback(control.close)
        supervisor.guests += [control, writer]
        outcome = supervisor.run()
        control.flush()
        return _conclude(outcome, view)


class _Keeper:
    """Tells of failures and keeps them as crash bundles."""

    def __init__(self, plan: LaunchPlan, output: logs.OutputRelay, story: Story) -> None:
        self._plan = plan
        self._output = output
        self.story = story

    def keep(self, cause: Failure, others: tuple[Failure, ...], tree: Tree) -> str:
        """The line that says where; empty for a wrong setting, which needs no post-mortem."""
        if cause.permanent:
            return ""
        try:
            path = write_bundle(
                envs.state_dir(),
                self._plan.name,
                cause,
                others,
                story=self.story(cause, others),
                outputs={record.title: self._output.tail(record.title) for record in tree},
                facts={
                    "plan": to_json(self._plan),
                    "processes": [
                        {"title": r.title, "pid": r.pid, "step": r.step, "since": r.since, "restarts": r.restarts}
                        for r in tree
                    ],
                    "notes": [f"{record.title}: {note}" for record in tree for note in record.notes],
                },
            )
        except (OSError, XserveError) as error:
            return f"no crash bundle: {error}"
        return f"crash bundle: {path}"


def _settings(config: LaunchConfig, plan: LaunchPlan, url: str, lock_fd: int, keeper: _Keeper) -> SupervisorSettings:
    environment = envs.child_environment() | (dict(plan.helper.env) if plan.helper else {})
    return SupervisorSettings(
        method=plan.start_method,
        helper=HelperSettings(
            preload=plan.helper.preload if plan.helper else (),
            clean_up=run_dir.REMOVE_LEFT,
            run_dir=plan.run_dir,
            launch_id=plan.launch_id,
        ),
        launch_id=plan.launch_id,
        ready_timeout=plan.ready_timeout,
        shutdown_timeout=plan.shutdown_timeout,
        environment=environment | {"XSERVE_LAUNCH_ID": plan.launch_id},
        watchdog_timeout=config.watchdog_timeout,
        restart=RestartSettings(
            policy=config.restart,
            max_restarts=config.max_restarts,
            window=config.restart_window,
            longest_delay=config.restart_backoff,
        ),
        renew=of_generation,
        story=keeper.story,
        keep=keeper.keep,
        lock_fd=lock_fd,
        ready_line=f"ready: {plan.serves or f'{plan.served_model_name} at {url}'}",
    )


def _conclude(outcome: Outcome, view: Screen) -> int:
    """Say how it ended; the last line says what was cut short."""
    if outcome.cause is not None:
        error = ChildFailedError(outcome.cause, outcome.follow_ons)
        error.exit_code = outcome.exit_code
        raise error
    cut = []
    if outcome.cut_requests:
        cut.append(f"{outcome.cut_requests} requests")
    cut += outcome.cut_short
    view.note(f"stopped; cut short: {', '.join(cut)}" if cut else "stopped")
    return outcome.exit_code


@contextlib.contextmanager
def _listening(plan: LaunchPlan) -> Iterator[tuple[socket.socket | None, str]]:
    """The HTTP socket and the url that leads to it."""
    binding = plan.http
    if binding is None:
        yield None, ""
        return
    sock = listen.listen_unix(binding.uds) if binding.uds else listen.listen_tcp(binding.host, binding.port)
    try:
        yield sock, binding.url(None if binding.uds else sock.getsockname()[1])
    finally:
        sock.close()
        if binding.uds:
            with contextlib.suppress(OSError):
                os.unlink(binding.uds)


class _Control:
    """Answers the control socket from what the supervisor knows."""

    def __init__(self, supervisor: Supervisor, plan: LaunchPlan, url: str) -> None:
        self._supervisor = supervisor
        self._plan = plan
        self._url = url

    def __call__(self, request: Request) -> Reply:
        if isinstance(request, StatusRequest):
            return StatusReply(self._status())
        if isinstance(request, StopRequest):
            budget = self._plan.shutdown_timeout if request.budget is None else request.budget
            if self._supervisor.state in (State.STARTING, State.READY, State.RECOVERING):
                self._supervisor.ask_to_stop(budget=budget)
            return StopReply(pid=os.getpid(), budget=budget)
        return ErrorReply(f"unknown request {type(request).__name__}")

    def _status(self) -> InstanceStatus:
        import time

        supervisor = self._supervisor
        rows = [
            ProcessStatus(
                title=record.title,
                role=record.spec.role,
                rank=record.spec.rank,
                node=record.spec.node,
                pid=record.pid,
                phase=record.step,
                since=record.since,
                restarts=record.restarts,
            )
            for record in supervisor.tree
        ]
        since = time.time() - (clock.now() - supervisor.since)
        return InstanceStatus(
            name=self._plan.name, state=supervisor.state, since=since, url=self._url, processes=tuple(rows)
        )


def _name_supervisor() -> None:
    import setproctitle

    setproctitle.setproctitle("xserve::Supervisor")
    kernel.set_comm("xs:supervisor")


def _open_standard_fds() -> None:
    """With 0, 1 or 2 closed the next file we open would get that number, and somebody's print would go into it."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd < 3:
        os.set_inheritable(fd, True)  # or executed children would find them closed again
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def _raise_file_limit() -> None:
    """Every stream is a descriptor: use what the system allows (FIELD: "too many open files" at 1000 requests)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
