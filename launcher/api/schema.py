"""What a request may hold: one pydantic model per endpoint, and every parameter that exists has its fate here.

A parameter is *supported* (a field), *harmless* (accepted and ignored: it cannot change the answer), *unsupported but
for its neutral value* (a field of `_Neutral`, or checked below), or unknown. The last two are answered with 400: an
answer that silently differs from what was asked for is worse than none.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from launcher.api.errors import ApiError, bad_request, unsupported

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_LOGPROBS = 20

HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "prediction",
})  # fmt: skip

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "use n"),
    "echo": ((False,), "only echo=false is"),
    "suffix": (("",), "leave it out"),
    "logit_bias": (({},), "leave it out"),
    "repetition_penalty": ((1,), "use presence_penalty or frequency_penalty"),
    "min_p": ((0,), "use top_p or top_k"),
    "tools": (([],), "this server calls no tools"),
    "tool_choice": (("none", "auto"), "this server calls no tools"),
    "functions": (([],), "this server calls no tools"),
    "function_call": (("none", "auto"), "this server calls no tools"),
    "modalities": ((["text"],), "only ['text'] is"),
    "audio": ((), "only text is"),
    "reasoning_effort": (("none",), "leave it out"),
    "verbosity": (("medium",), "leave it out"),
    "web_search_options": ((), "leave it out"),
    "add_generation_prompt": ((True,), "only true is"),
    "continue_final_message": ((False,), "only false is"),
    "skip_special_tokens": ((True,), "only true is"),
    "include_stop_str_in_output": ((False,), "only false is"),
}
"""Parameter → the values that mean "as if it were not there" (null always does), and what is supported instead."""

Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]
TokenIds = Annotated[list[StrictInt], Field(max_length=64)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False
    """Padding against traffic analysis, of no use on one's own machine: accepted, never added."""


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: StrictStr


class BaseRequest(BaseModel):
    """What both endpoints share. Unknown fields are kept, to be judged by `check_extras`."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    model: StrictStr
    max_tokens: Annotated[StrictInt, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=2**31 - 1)] | None = None
    """Extension; 0 and -1: all."""
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StrictStr | list[StrictStr] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    response_format: ResponseFormat | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] | None = None
    """Extension: neither stop strings nor stop tokens end the answer before."""
    ignore_eos: StrictBool | None = None
    """Extension: the model's end-of-sequence token is a token like any other."""
    stop_token_ids: TokenIds | None = None
    """Extension: tokens that end the answer; not part of its text."""

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(BaseRequest):
    prompt: Any = None
    """A string, strings, token ids or lists of token ids: told apart in `prompts`, in better words than a union's."""
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: StrictStr
    text: StrictStr | None = None


class Message(BaseModel):
    """Further fields (``name``, ``tool_calls`` …) go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: StrictStr | list[ContentPart] | None = None


class ChatRequest(BaseRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: options of the model's own template, such as ``enable_thinking``."""


Request = TypeVar("Request", bound=BaseRequest)


def parse(kind: type[Request], body: bytes) -> Request:
    """A checked request out of a body. ApiError (400) names the parameter."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None
    _check_extras(request.model_extra or {})
    _check_shared(request)
    return request


def _explain(error: ValidationError) -> ApiError:
    """The first fault in one line. Of a union pydantic reports every branch; the one that got furthest was meant."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    first = max((f for f in faults if f["loc"][:1] == faults[0]["loc"][:1]), key=lambda f: len(f["loc"]))
    message = first["msg"]
    if first["type"] == "json_invalid":
        return bad_request(f"The request body is no valid JSON: {message.removeprefix('Invalid JSON: ')}.")
    param = ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES:
            param += f".{part}" if param else part
    if not param:
        return bad_request(f"The request body must be a JSON object: {message}.")
    if first["type"] == "missing":
        return bad_request(f"{param} is missing.", param, "missing_required_parameter")
    return bad_request(f"{param}: {message}.", param, "invalid_value")


_BRANCHES = frozenset({"str", "list", "constrained", "nullable"})
"""Names of union branches in pydantic's locations; no field is called so."""


def _check_extras(extras: dict[str, Any]) -> None:
    for name, value in extras.items():
        if value is None or name in HARMLESS:
            continue
        if name not in NEUTRAL:
            raise bad_request(f"{name} is not a parameter of this endpoint.", name, "unknown_parameter")
        neutral, instead = NEUTRAL[name]
        if value not in neutral:
            raise unsupported(name, instead)


def _check_shared(request: BaseRequest) -> None:
    if len(request.stops) > MAX_STOPS:
        raise bad_request(f"stop has {len(request.stops)} strings; at most {MAX_STOPS} are possible.", "stop")
    if "" in request.stops:
        raise bad_request("stop holds an empty string, which would end every answer at once; leave it out.", "stop")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only possible with stream=true.", "stream_options")
    if request.response_format is not None and request.response_format.type != "text":
        raise unsupported("response_format", "only {'type': 'text'} is")
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs is only possible with logprobs=true.", "top_logprobs")
