"""One request on the client's side: what it was sent with, what has come, and who waits for more (asyncio).

Outputs that come faster than they are taken are given out together: a reader that falls behind has fewer turns to take,
not more.
"""

from __future__ import annotations

import asyncio

from launcher.engine.messages import AddRequest, RequestOutput, SamplingParams
from launcher.errors import XserveError


class Stream:
    """Lives from `generate` to the last output, over as many lives of the core as that takes."""

    __slots__ = ("_error", "_output", "_pending", "_prompt", "_sendings", "_waiter", "params", "request_id", "wire_id")

    def __init__(self, request_id: str, prompt: bytes, params: SamplingParams, output: bytes) -> None:
        self.request_id = request_id
        self.params = params
        self.wire_id = ""
        """Its name at the core; another with every sending, so that late outputs of one before are not taken for its.
        Empty: it is not at the core."""
        self._prompt = prompt
        self._output = bytearray(output)
        """int32 tokens that the core has answered, over all lives."""
        self._sendings = 0
        self._pending: list[RequestOutput] = []
        self._error: XserveError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def message(self) -> AddRequest:
        """To send it, again or for the first time: under a new `wire_id`."""
        self._sendings += 1
        self.wire_id = self.request_id if self._sendings == 1 else f"{self.request_id}~{self._sendings}"
        return AddRequest(self.wire_id, self._prompt, self.params, bytes(self._output))

    def put(self, output: RequestOutput) -> None:
        """An output of the core."""
        self._output += output.new_token_ids
        self._pending.append(output)
        self._wake()

    def put_sign_of_life(self) -> None:
        """For a reader that waits: an output that says nothing."""
        if not self._pending:
            self._pending.append(RequestOutput(self.request_id, b""))
            self._wake()

    def fail(self, error: XserveError) -> None:
        """Raised to the reader once it has taken what was there."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> RequestOutput:
        """All that has come since the last call, as one output. Raises what `fail` was given."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pending, self._pending = self._pending, []
        if len(pending) == 1 and pending[0].request_id == self.request_id:
            return pending[0]
        last = pending[-1]
        return RequestOutput(
            self.request_id,
            b"".join(output.new_token_ids for output in pending),
            last.finish_reason,
            last.stop_token_id,
            tuple(entry for output in pending for entry in output.logprobs),
            last.error,
        )
