"""What a client is told when its request is not answered: OpenAI-style JSON, one line that says what to do.

Every refusal is an `ApiError`, raised where it is found and turned into an answer in one place (`routes`), or into the
last event of a stream that has already begun (`stream`). The constructors below are the whole list of refusals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

RETRY_AFTER = {"retry-after": "1"}
"""Seconds. A start-up or a full queue changes in about that time; clients add their own back-off."""


class ApiError(Exception):
    """A request that ends without its answer. `status` is HTTP's; `param` names the field that is to be changed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


class ClientGone(Exception):  # noqa: N818 - nothing went wrong: the client hung up
    """The client closed its connection before the answer was complete; nobody is left to be told anything."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, supported: str) -> ApiError:
    """A parameter that would change the answer, and that we would otherwise have to ignore silently."""
    return bad_request(f"{param} is not supported; {supported}", param, "unsupported_parameter")


def wrong_key(missing: bool) -> ApiError:
    what = "No API key was given" if missing else "The API key is wrong"
    return ApiError(
        401,
        f"{what}; send it as 'Authorization: Bearer <key>'.",
        code="missing_api_key" if missing else "invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def unknown_model(name: str, served: str) -> ApiError:
    message = f"The model {name!r} is not served here; {served!r} is."
    return ApiError(404, message, param="model", code="model_not_found")


def too_long(prompt: int, wanted: int, limit: int, *, prompt_name: str, limit_name: str) -> ApiError:
    """Numbers of tokens; the names are those of the fields that the client would change."""
    if prompt >= limit:
        text = f"The prompt has {prompt} tokens, but prompt and answer together may have {limit}; shorten the prompt."
        return bad_request(text, prompt_name, "context_length_exceeded")
    text = (
        f"The prompt has {prompt} tokens and {limit_name} asks for {wanted}: {prompt + wanted} together, "
        f"but at most {limit} are possible; ask for at most {limit - prompt}."
    )
    return bad_request(text, limit_name, "context_length_exceeded")


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


def unavailable(state: str, phase: str) -> ApiError:
    """Not ready, or no longer: the client may try again, here or elsewhere."""
    message = f"The server is not ready: {phase or state}. Try again in a moment."
    return ApiError(503, message, kind="service_unavailable", code=state, headers=RETRY_AFTER)


def overloaded(limit: int) -> ApiError:
    message = f"{limit} requests wait or run already, the most that this server takes. Try again in a moment."
    return ApiError(503, message, kind="service_unavailable", code="overloaded", headers=RETRY_AFTER)


def cut_short() -> ApiError:
    message = "The server is stopping and its time for running requests is over; send the request again."
    return ApiError(503, message, kind="service_unavailable", code="shutting_down", headers=RETRY_AFTER)


def engine_failed(message: str, code: str = "engine_error") -> ApiError:
    return ApiError(500, message, kind="server_error", code=code)


def poisoned(message: str) -> ApiError:
    """Clients that send a 500 again by themselves are told not to (OpenAI's own obey the header)."""
    return ApiError(500, message, kind="server_error", code="poison_request", headers={"x-should-retry": "false"})


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status, headers=dict(headers or {}), media_type="application/json")
