from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from launcher.api.routes import build_app
from launcher.api.state import ApiState
from tests.api.fakes import FakeEngine, Served, make_state, served


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def state(engine: FakeEngine) -> Iterator[ApiState]:
    state = make_state(engine)
    yield state
    state.close()


@contextmanager
def client_of(server: Served, key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def server(state: ApiState) -> Iterator[Served]:
    with served(state) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


class Asker:
    """Asks the application in process, one event loop a question."""

    def __init__(self, state: ApiState) -> None:
        self._app = build_app(state)

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)
