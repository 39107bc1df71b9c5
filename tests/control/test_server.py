"""The control server with real clients: good, slow, silent, rude."""

from __future__ import annotations

import json
import os
import select
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.clock import Deadline
from launcher.control import server as module
from launcher.control.protocol import (
    REQUEST_BYTES,
    ErrorReply,
    InstanceStatus,
    ProcessStatus,
    Reply,
    Request,
    StatusReply,
    StatusRequest,
    StopReply,
    StopRequest,
    decode_reply,
    decode_request,
    encode,
)
from launcher.control.server import ControlServer
from launcher.errors import HostError, UsageError

BIG = 200_000


def handle(request: Request) -> Reply:
    if isinstance(request, StopRequest):
        if request.budget == 1.0:
            raise UsageError("no such stop")
        if request.budget == 2.0:
            raise ZeroDivisionError("a bug")
        return StopReply(1, 2.0)
    status = InstanceStatus(name="n" * BIG, state="ready", since=0.0, url="")
    return StatusReply(status)


@pytest.fixture
def server(private_places: Path) -> Iterator[ControlServer]:
    one = ControlServer(private_places / "c.sock", handle)
    yield one
    one.close()
    assert not (private_places / "c.sock").exists()


def turn(server: ControlServer, times: int = 1) -> None:
    """Some turns of a poll loop that never waits."""
    for _ in range(times):
        poll = select.poll()
        for fd, events in server.filenos().items():
            poll.register(fd, events)
        for fd, _ in poll.poll(0):
            server.on_event(fd)


@pytest.fixture
def connect(server: ControlServer) -> Iterator[Callable[[], socket.socket]]:
    made: list[socket.socket] = []

    def dial() -> socket.socket:
        made.append(socket.socket(socket.AF_UNIX))
        made[-1].settimeout(5)
        made[-1].connect(str(server.path))
        return made[-1]

    yield dial
    for one in made:
        one.close()


def read_line(connection: socket.socket, server: ControlServer) -> bytes:
    data = b""
    connection.setblocking(False)
    deadline = Deadline.after(5)
    while not data.endswith(b"\n"):
        assert not deadline.expired
        turn(server)
        try:
            more = connection.recv(1 << 16)
        except BlockingIOError:
            continue
        if not more:
            break
        data += more
    return data


@pytest.mark.parametrize(
    "message",
    [
        StatusRequest(),
        StopRequest(),
        StopRequest(3.5),
    ],
)
def test_requests_survive_the_wire(message: Request) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode_request(line) == message


def test_replies_survive_the_wire_and_status_has_the_documented_fields() -> None:
    process = ProcessStatus(title="Worker_DP0_PP0_TP0", role="worker", rank=0, pid=7, phase="ready", since=1.5)
    status = InstanceStatus(name="a\nb", state="ready", since=1.0, url="u", processes=(process,))
    for reply in (StatusReply(status), StopReply(1, 2.0), ErrorReply("x")):
        assert decode_reply(encode(reply)) == reply
    plain = json.loads(encode(StatusReply(status)))["status"]
    assert list(plain) == ["name", "state", "since", "url", "processes"]
    assert list(plain["processes"][0]) == ["title", "role", "rank", "node", "pid", "phase", "since", "restarts"]


def test_socket_is_for_its_owner_only(server: ControlServer) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600


def test_a_request_in_pieces_and_a_reply_larger_than_the_socket_buffer(
    server: ControlServer, connect: Callable[[], socket.socket]
) -> None:
    client = connect()
    line = encode(StatusRequest())
    for at in range(len(line)):
        client.send(line[at : at + 1])
        turn(server)
    reply = decode_reply(read_line(client, server))
    assert isinstance(reply, StatusReply)
    assert len(reply.status.name) == BIG
    assert len(server.filenos()) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"not json\n", "not a request"),
        (b'{"type": "dance"}\n', "not a request"),
        (b"\n", "not a request"),
        (b'{"type": "stop", "budget": "soon"}\n', "not a request"),
        (encode(StopRequest(1.0)), "no such stop"),
        (encode(StopRequest(2.0)), "ZeroDivisionError: a bug"),
    ],
)
def test_what_is_wrong_is_said_and_the_server_lives_on(
    server: ControlServer, connect: Callable[[], socket.socket], line: bytes, words: str
) -> None:
    client = connect()
    client.sendall(line)
    reply = decode_reply(read_line(client, server))
    assert isinstance(reply, ErrorReply)
    assert words in reply.message
    other = connect()
    other.sendall(encode(StopRequest()))
    assert decode_reply(read_line(other, server)) == StopReply(1, 2.0)


def test_unknown_fields_are_skipped() -> None:
    assert decode_request(b'{"type": "stop", "budget": 1, "later": true}') == StopRequest(1)


def test_silent_clients_are_bounded_and_lock_nobody_out(
    server: ControlServer, connect: Callable[[], socket.socket]
) -> None:
    silent = [connect() for _ in range(module.CLIENTS)]
    turn(server, module.CLIENTS)
    assert len(server.filenos()) == module.CLIENTS + 1
    client = connect()
    client.sendall(encode(StopRequest()))
    assert decode_reply(read_line(client, server)) == StopReply(1, 2.0)
    assert len(server.filenos()) <= module.CLIENTS + 1
    assert silent[0].recv(1) == b""


def test_who_is_over_time_is_dropped(
    server: ControlServer, connect: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "CLIENT_SECONDS", 0.0)
        client = connect()
        turn(server)
        assert list(server.filenos().values()) == [select.POLLIN]
        assert client.recv(1) == b""


def test_a_line_without_end_is_dropped(server: ControlServer, connect: Callable[[], socket.socket]) -> None:
    client = connect()
    client.setblocking(False)
    turn(server)
    deadline = Deadline.after(5)
    dropped = False
    while not dropped:
        assert not deadline.expired
        try:
            client.send(b"x" * REQUEST_BYTES)
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            dropped = True
        turn(server)
    assert len(server.filenos()) == 1


def test_a_client_that_goes_away_is_forgotten(server: ControlServer, connect: Callable[[], socket.socket]) -> None:
    client = connect()
    client.sendall(encode(StatusRequest()))
    client.close()
    turn(server, 4)
    assert len(server.filenos()) == 1
    server.on_event(99999)


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="changes the uid")
def test_another_uid_is_turned_away(server: ControlServer) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(_stranger_is_dropped(str(server.path)))
    deadline = Deadline.after(5)
    while not deadline.expired:
        turn(server)
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            break
    assert os.waitstatus_to_exitcode(status) == 0


def _stranger_is_dropped(path: str) -> int:
    """In a child: connect as root would be let in; become somebody else after opening the directory for him."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5)
    os.chmod(path, 0o777)  # the mode alone must not be what keeps strangers out
    for parent in list(Path(path).parents)[:2]:
        os.chmod(parent, 0o755)
    os.setresuid(54321, 54321, 54321)
    try:
        client.connect(path)
        client.sendall(encode(StopRequest()))
        return 0 if client.recv(100) == b"" else 1
    except (ConnectionResetError, BrokenPipeError):
        return 0
    except OSError:
        return 2


def test_a_directory_that_is_not_there_is_a_host_error(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="control socket"):
        ControlServer(tmp_path / "none" / "c.sock", handle)
