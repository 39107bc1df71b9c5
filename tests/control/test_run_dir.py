"""Claiming, finding and reclaiming run directories, by real processes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.control import places, run_dir
from launcher.errors import HostError, NotRunningError, UsageError
from tests.conftest import eventually
from tests.control.conftest import FakeSupervisor, in_child

Make = Callable[..., FakeSupervisor]


def test_a_claim_is_private_recorded_and_removed(private_places: Path) -> None:
    owned = run_dir.claim("one")
    assert owned.path == private_places / "xserve" / "one"
    assert stat.S_IMODE(owned.path.stat().st_mode) == 0o700
    assert run_dir.is_live(owned.path)
    owned.record(launch_id="abc", url="http://h:1")
    seen = run_dir.find("one")
    assert (seen.pid, seen.launch_id, seen.url) == (os.getpid(), "abc", "http://h:1")
    assert run_dir.is_running(seen)
    (owned.path / "sub").mkdir()
    (owned.path / "sub" / "file").touch()
    owned.remove()
    owned.remove()
    assert list((private_places / "xserve").iterdir()) == []


def test_unnamed_launches_take_the_first_free_name(supervisors: Make) -> None:
    first, second = supervisors(), supervisors()
    assert [i.name for i in run_dir.list_instances()] == ["default", "default-2"]
    first.kill()
    first.wait()
    third = supervisors()
    assert third.path == first.path
    assert {i.pid for i in run_dir.list_instances()} == {second.pid, third.pid}


def test_a_live_name_is_refused_with_its_pid(supervisors: Make) -> None:
    holder = supervisors("taken")
    with pytest.raises(UsageError, match=rf"taken.*pid {holder.pid}"):
        run_dir.claim("taken")


def test_find_names_the_instances_when_there_are_several(supervisors: Make) -> None:
    with pytest.raises(NotRunningError):
        run_dir.find(None)
    supervisors("a")
    assert run_dir.find(None).name == "a"
    supervisors("b")
    with pytest.raises(UsageError, match=r"a, b.*--name"):
        run_dir.find(None)
    with pytest.raises(NotRunningError, match=r"'c'.*running: a, b"):
        run_dir.find("c")


def test_one_without_a_control_socket_is_not_meant_unless_it_is_named(supervisors: Make) -> None:
    owned = run_dir.claim("engine-in-a-script")
    try:
        assert run_dir.find(None).name == owned.name
        supervisors("launch")
        assert run_dir.find(None).name == "launch"
        assert run_dir.find(owned.name).pid == os.getpid()
    finally:
        owned.remove()


def test_what_a_killed_owner_left_is_reclaimed_by_the_next_start(supervisors: Make, private_places: Path) -> None:
    dead = supervisors("dead")
    (dead.path / "junk").write_text("x")
    dead.kill()
    dead.wait()
    assert not run_dir.is_live(dead.path)
    assert run_dir.list_instances() == []
    owned = run_dir.claim("other")
    try:
        assert [p.name for p in (private_places / "xserve").iterdir()] == ["other"]
    finally:
        owned.remove()


def test_reclaim_leaves_a_live_one_alone(supervisors: Make) -> None:
    one = supervisors("live")
    assert not run_dir.reclaim(one.path)
    one.kill()
    one.wait()
    assert run_dir.reclaim(one.path)
    assert not one.path.exists()
    assert not run_dir.reclaim(one.path)


def test_many_who_claim_at_once_get_one_name_each(private_places: Path) -> None:
    def body(report: int) -> None:
        owned = run_dir.claim(None)
        os.write(report, owned.name.encode() + b"\n")
        os.read(go_read, 1)  # held until everybody has one
        owned.remove()

    go_read, go_write = os.pipe()
    children = [in_child(body) for _ in range(8)]
    names = [os.read(pipe, 100).decode().strip() for _, pipe in children]
    os.write(go_write, b"x" * 8)
    for pid, pipe in children:
        assert os.waitpid(pid, 0)[1] == 0
        os.close(pipe)
    os.close(go_read)
    os.close(go_write)
    assert len(set(names)) == 8
    assert "default" in names
    assert list((private_places / "xserve").iterdir()) == []


def test_a_forked_child_does_not_remove_the_directory() -> None:
    owned = run_dir.claim("parent")
    pid, pipe = in_child(lambda report: owned.remove())
    assert os.waitpid(pid, 0)[1] == 0
    os.close(pipe)
    assert owned.path.exists()
    owned.remove()


def test_runtime_directory_is_used_whole_and_only_emptied(
    private_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = private_places / "unit"
    given.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("RUNTIME_DIRECTORY", str(given))
        owned = run_dir.claim(None)
        assert (owned.path, owned.name) == (given, "unit")
        assert run_dir.find("unit").pid == os.getpid()
        owned.remove()
    assert given.is_dir()
    assert list(given.iterdir()) == []


def test_a_long_name_is_shortened_and_still_found() -> None:
    names = ["n" * 200 + "a", "n" * 200 + "b", "日本語" * 25]
    owned = [run_dir.claim(name) for name in names]
    try:
        for one in owned:
            assert len(os.fsencode(one.socket_path("c" * places.FILE_NAME_BYTES))) <= places.SOCKET_PATH_BYTES
        assert {run_dir.find(name).path for name in names} == {str(one.path) for one in owned}
    finally:
        for one in owned:
            one.remove()


@pytest.mark.parametrize("name", ["", "a/b", ".x", "-x", "a\nb", "x" * 300])
def test_names_that_cannot_be_directories_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        run_dir.claim(name)


def test_a_base_too_long_for_sockets_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir(mode=0o700)
    with monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(deep))
        owned = run_dir.claim("x")
        assert deep not in owned.path.parents
        assert len(os.fsencode(owned.control_socket)) <= places.SOCKET_PATH_BYTES
        owned.remove()


def test_without_any_runtime_directory_a_private_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
        for name in ("HOME", "USER", "LOGNAME"):
            patch.delenv(name, raising=False)
        base = places._temporary_bases()[0]
        if not Path(f"/run/user/{os.getuid()}").exists():
            owned = run_dir.claim("x")
            assert owned.path.parent == base
            assert stat.S_IMODE(base.stat().st_mode) == 0o700
            owned.remove()


@pytest.mark.parametrize("attack", ["link", "open", "file"])
def test_a_temporary_base_that_a_stranger_prepared_is_refused(tmp_path: Path, attack: str) -> None:
    base = tmp_path / "base"
    if attack == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        base.symlink_to(tmp_path / "elsewhere")
    elif attack == "open":
        base.mkdir()
        base.chmod(0o777)
    else:
        base.touch()
    with pytest.raises(HostError, match="base"):
        places.make_private(base)


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="changes owners")
def test_another_users_directory_is_refused_and_not_searched() -> None:
    base = places._temporary_bases()[0]
    base.mkdir(mode=0o700)
    os.chown(base, 12345, 12345)
    with pytest.raises(HostError, match="belongs to uid 12345"):
        places.make_private(base)
    assert base not in list(places.bases_to_search())


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="changes the uid")
def test_a_uid_without_a_passwd_entry_can_claim() -> None:
    def body(report: int) -> None:
        os.setresgid(54321, 54321, 54321)
        os.setresuid(54321, 54321, 54321)
        for name in ("HOME", "USER", "XDG_RUNTIME_DIR"):
            os.environ.pop(name, None)
        places._temporary_bases = lambda: [Path(f"/tmp/xserve-test-{os.getpid()}")]  # type: ignore[attr-defined]
        owned = run_dir.claim(None)
        owned.remove()
        owned.path.parent.rmdir()

    pid, pipe = in_child(body)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(pipe)


def test_the_lock_outlives_no_owner(supervisors: Make) -> None:
    one = supervisors("x")
    one.kill()
    eventually(lambda: not run_dir.is_live(one.path), 5, "lock let go")
