from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from launcher.api.routes import build_app
from launcher.api.state import ApiState
from tests.api.fakes import FakeEngine, make_state


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def state(engine: FakeEngine) -> Iterator[ApiState]:
    state = make_state(engine)
    yield state
    state.close()


class Asker:
    """Asks the application in process, one event loop a question."""

    def __init__(self, state: ApiState) -> None:
        self._app = build_app(state)

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)
