"""The HTTP interface: which path answers what, and how every refusal becomes an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from time import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launcher import __version__
from launcher.api.chat import chat_completions
from launcher.api.completions import completions
from launcher.api.errors import RETRY_AFTER, ApiError, ClientGone, json_response, unknown_model
from launcher.api.metrics import CONTENT_TYPE
from launcher.api.middleware import Figures, Guard, read_body
from launcher.api.state import ApiState
from launcher.api.stream import as_api_error
from launcher.clock import now

Work = Callable[[ApiState, Request, bytes], Awaitable[Response]]


def build_app(state: ApiState) -> Starlette:
    """The ASGI application over `state`. Starts nothing: whoever makes the state opens and closes what it holds."""
    probes = _Probes(state)
    models = _Models(state)
    routes = [
        Route("/v1/models", models.all),
        Route("/v1/models/{name:path}", models.one),
        Route("/v1/completions", _work(state, completions), methods=["POST"]),
        Route("/v1/chat/completions", _work(state, chat_completions), methods=["POST"]),
        Route("/livez", probes.livez),
        Route("/startupz", probes.startupz),
        Route("/readyz", probes.readyz),
        Route("/health", probes.health),
        Route("/metrics", probes.metrics),
        Route("/version", probes.version),
    ]
    state.metrics.watch(lambda: state.engines, lambda: state.in_flight)
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(Figures, metrics=state.metrics, paths=frozenset(r.path for r in routes)),
            Middleware(Guard, keys=state.settings.api_keys),
        ],
        exception_handlers={HTTPException: _http_error},
    )


def _work(state: ApiState, work: Work) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint with a body whose failures all become answers."""

    async def endpoint(request: Request) -> Response:
        try:
            body = await read_body(request.receive, request.headers, state.settings.max_body_bytes)
            return await work(state, request, body)
        except (ClientGone, EOFError):
            return Response(status_code=499)  # nobody reads it; it stands in the figures
        except Exception as error:
            return as_api_error(error).response()

    return endpoint


async def _http_error(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    code = phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, f"{phrase}: {request.method} {request.url.path}", code=code,
                    headers=error.headers).response()  # fmt: skip


class _Models:
    def __init__(self, state: ApiState) -> None:
        self._state = state
        self._created = int(time())

    async def all(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def one(self, request: Request) -> Response:
        served = self._state.settings.served_model_name
        if request.path_params["name"] != served:
            return unknown_model(request.path_params["name"], served).response()
        return json_response(self._card())

    def _card(self) -> dict[str, object]:
        lengths = [slot.engine.info.max_model_len for slot in self._state.engines if slot.engine.info is not None]
        return {
            "id": self._state.settings.served_model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "xserve",
            "max_model_len": min(lengths, default=None),
        }


class _Probes:
    """livez: the process answers. startupz: the tree was ready once. readyz: requests are taken. health: and the
    engines make progress."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def livez(self, _request: Request) -> Response:
        return json_response({"status": "ok"})

    async def startupz(self, _request: Request) -> Response:
        gate = self._state.gate
        if gate.was_ready:
            return json_response({"status": "ok"})
        return _not_ok(gate.state, gate.phase or gate.state)

    async def readyz(self, _request: Request) -> Response:
        reason = self._state.not_ready()
        return json_response({"status": "ok"}) if reason is None else _not_ok(*reason)

    async def health(self, _request: Request) -> Response:
        reason = self._state.unhealthy()
        if reason is not None:
            return json_response({"status": "unhealthy", "reason": reason}, 503, RETRY_AFTER)
        engines = [
            {"engine": index, "seconds_since_progress": round(max(0.0, now() - slot.engine.last_progress), 3)}
            for index, slot in enumerate(self._state.engines)
        ]
        return json_response({"status": "ok", "engines": engines})

    async def metrics(self, _request: Request) -> Response:
        return Response(self._state.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def version(self, _request: Request) -> Response:
        return json_response({"version": __version__})


def _not_ok(state: str, phase: str) -> Response:
    return json_response({"status": "unavailable", "state": state, "phase": phase}, 503, RETRY_AFTER)
