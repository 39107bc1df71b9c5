"""Which class a backend's name means."""

from __future__ import annotations

import pytest

from launcher.errors import UsageError
from launcher.executor.base import Executor, resolve_executor
from launcher.executor.multiproc import MultiprocExecutor
from launcher.executor.uniproc import UniProcExecutor


class NoExecutor:
    pass


class Mine(UniProcExecutor):
    pass


def test_by_name() -> None:
    assert resolve_executor("uni") is UniProcExecutor
    assert resolve_executor("mp") is MultiprocExecutor
    assert resolve_executor(f"{__name__}:Mine") is Mine
    assert issubclass(Mine, Executor)


BAD = [
    ("spam", "unknown backend 'spam'; write uni, mp or module:Class"),
    (f"{__name__}:NoExecutor", "NoExecutor is not an Executor; derive it from launcher.executor.base:Executor"),
    (f"{__name__}:Nope", "has no 'Nope'"),
    ("no_such_module:X", "there is no module 'no_such_module'"),
]


@pytest.mark.parametrize(("name", "message"), BAD)
def test_bad_names(name: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve_executor(name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
