"""The engine as a library: in the caller's tree, under each start method, and gone with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from launcher import Engine
from launcher.errors import ChildFailedError, ClosedError, UsageError
from launcher.worker.reference import ReferenceWorker, expected_tokens
from tests.conftest import eventually
from tests.e2e.launch import descendants, start_time


class Speaking(ReferenceWorker):
    def whisper(self, word: str) -> tuple[int, str]:
        return self.settings.ranks.rank, word


@pytest.fixture(params=["fork", "spawn"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_generate(method: str) -> None:
    with Engine(tp=2, start_method=method, max_num_seqs=4) as engine:  # type: ignore[arg-type]
        prompts = [f"prompt {n}" * (n + 1) for n in range(9)]
        answers = engine.generate(prompts, max_tokens=7)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = expected_tokens(list(prompt.encode()), 7)
        assert answer.token_ids == tokens
        assert answer.text == "".join(f"{token} " for token in tokens)
        assert answer.finish_reason == "length"
    with pytest.raises(ClosedError):
        engine.generate(["late"])
    engine.close()


def test_uni_is_the_same(method: str) -> None:
    with Engine(tp=1, backend="uni") as uni, Engine(tp=1, backend="mp", start_method=method) as mp:  # type: ignore[arg-type]
        assert uni.generate([[1, 2, 3]], max_tokens=9) == mp.generate([[1, 2, 3]], max_tokens=9)


def test_stop_strings_and_bad_options() -> None:
    with Engine(tp=1) as engine:
        tokens = expected_tokens([104, 105], 8)
        [answer] = engine.generate(["hi"], max_tokens=8, stop=[f"{tokens[3]} "])
        assert answer.finish_reason == "stop"
        assert answer.text == "".join(f"{token} " for token in tokens[:3])
        with pytest.raises(UsageError, match="unknown option max_token;"):
            engine.generate(["hi"], max_token=3)
        with pytest.raises(UsageError, match="prompts is a list"):
            engine.generate("hi")
    with pytest.raises(UsageError, match="sizes"):
        Engine(sizes=3)


def test_own_class_and_calls(method: str) -> None:
    with Engine(tp=2, worker=Speaking, start_method=method) as engine:  # type: ignore[arg-type]
        assert engine.collective_rpc("whisper", ("x",)) == [(0, "x"), (1, "x")]
        assert engine.collective_rpc(lambda worker, n: worker.settings.ranks.rank + n, (10,)) == [10, 11]


def test_a_dead_worker_is_an_error_with_its_name(method: str) -> None:
    with Engine(tp=2, start_method=method) as engine:  # type: ignore[arg-type]
        [pid] = [p for p in descendants(os.getpid()) if _title(p) == "xserve::Worker_DP0_PP0_TP1"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ChildFailedError, match=r"rank 1 \(Worker_DP0_PP0_TP1\), pid .*SIGKILL"):
            engine.generate(["x"], max_tokens=1000)


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ").decode()


def script(tmp_path: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, env=os.environ | env, timeout=60, check=False
    )


def test_a_script_without_a_guard_just_works(tmp_path: Path) -> None:
    """Spawned workers do not import the caller's script: there is nothing to guard."""
    done = script(
        tmp_path,
        """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()  # no fork from here
        from launcher import Engine
        with Engine(tp=2) as engine:
            print(len(engine.generate(["x"], max_tokens=3)[0].token_ids))
        """,
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


_OWN_CLASS = """
from launcher import Engine
from launcher.worker.reference import ReferenceWorker

class Mine(ReferenceWorker):
    def name(self):
        return "mine"

{guard}engine = Engine(tp=2, worker=Mine, start_method="spawn"); print(engine.collective_rpc("name")); engine.close()
"""


def test_a_missing_guard_is_told_in_two_lines(tmp_path: Path) -> None:
    done = script(tmp_path, _OWN_CLASS.format(guard=""))
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 2, done.stderr
    assert "was called again by a worker process" in lines[0]
    assert lines[1].endswith("if __name__ == '__main__':")


def test_with_the_guard_it_runs(tmp_path: Path) -> None:
    done = script(tmp_path, _OWN_CLASS.format(guard="if __name__ == '__main__': "))
    assert (done.returncode, done.stdout) == (0, "['mine', 'mine']\n"), done.stderr


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_workers_go_with_the_script(tmp_path: Path, end: str, method: str) -> None:
    """Also of one that never closes its engine."""
    file = tmp_path / "script.py"
    wait = "" if end == "exit" else "import time; time.sleep(60)"
    file.write_text(
        f"from launcher import Engine\nengine = Engine(tp=2, start_method={method!r})\nprint('up', flush=True)\n"
        f"input()\n{wait}\n"
    )
    environment = os.environ | {"XSERVE_FAULT": "spawn_child:1", "XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "up\n"
        mark = [p for p in descendants(process.pid) if _title(p).startswith("xserve::Worker")]
        assert len(mark) == 2
        # A shell that a worker started, and the guard, must be gone as well.
        eventually(lambda: len(descendants(process.pid)) == 2 + 1 + 2, 5, "workers, guard, a shell and its sleep")
        workers = {pid: start_time(pid) for pid in descendants(process.pid)}
        if end == "kill":
            process.kill()
        else:
            process.stdin.write("\n")
            process.stdin.close()
        eventually(lambda: not [p for p, s in workers.items() if start_time(p) == s], 4)
        assert process.wait(10) == (0 if end == "exit" else -signal.SIGKILL)
    eventually(lambda: not list((tmp_path / "xserve").rglob("*")), 4, "the run directory is removed")


def test_fork_is_refused_where_it_is_not_safe() -> None:
    import threading

    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(UsageError, match=r"fork is not safe in this process: it runs 2 threads"):
            Engine(tp=1, backend="mp", start_method="fork")
        with Engine(tp=1, backend="mp") as engine:  # auto: spawn
            assert engine.generate(["x"], max_tokens=1)
    finally:
        done.set()
        thread.join()
