"""Figures for Prometheus: base units, counters end in ``_total``, every name begins with ``xserve_``.

A registry of its own per server: nothing is registered globally, and two servers in one process do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from launcher.api.state import Slot

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
CONTENT_TYPE: str = CONTENT_TYPE_LATEST


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("xserve_http_requests_total", "Answered HTTP requests", ["path", "status"], **r)
        self.latency = Histogram(
            "xserve_http_request_duration_seconds", "Until the last byte of the answer", ["path"], buckets=_SECONDS, **r
        )
        self.in_flight = Gauge("xserve_requests_in_flight", "Admitted requests that are not finished", **r)
        self.finished = Counter("xserve_sequences_finished_total", "Sequences by how they ended", ["reason"], **r)
        self.prompt_tokens = Counter("xserve_prompt_tokens_total", "Tokens of admitted prompts", **r)
        self.generated = Counter("xserve_generated_tokens_total", "Tokens generated for clients", **r)
        self.first_token = Histogram(
            "xserve_time_to_first_token_seconds", "From admission to the first token", buckets=_SECONDS, **r
        )
        self.token_gap = Histogram(
            "xserve_inter_token_seconds", "Between two tokens of a sequence", buckets=_TOKEN_SECONDS, **r
        )

    def tokens(self, count: int, *, since_start: float, last: float) -> float:
        """Note `count` new tokens of a sequence, `since_start` seconds after it began; `last`: what the call before
        answered (0: none). Answers what the next call shall give as `last`."""
        if not count:
            return last
        self.generated.inc(count)
        if last == 0.0:
            self.first_token.observe(since_start)
        else:
            self.token_gap.observe((since_start - last) / count)
        return since_start

    def watch(self, engines: Callable[[], Sequence[Slot]], in_flight: Callable[[], int]) -> None:
        """Read these when somebody asks for `/metrics`."""
        self.in_flight.set_function(in_flight)
        self.registry.register(_EngineFigures(engines))

    def text(self) -> bytes:
        out: bytes = generate_latest(self.registry)
        return out


_GAUGES = {
    "running": ("xserve_engine_sequences_running", "Sequences in the running batch"),
    "waiting": ("xserve_engine_sequences_waiting", "Sequences that wait for a place"),
    "free_blocks": ("xserve_engine_kv_blocks_free", "KV cache blocks that nobody holds"),
    "total_blocks": ("xserve_engine_kv_blocks", "KV cache blocks"),
}
_COUNTERS = {
    "preemptions": ("xserve_engine_preemptions", "Sequences pushed out and computed again"),
    "steps": ("xserve_engine_steps", "Steps of the engine"),
    "generated_tokens": ("xserve_engine_generated_tokens", "Tokens sampled, for all API servers"),
    "prompt_tokens": ("xserve_engine_prompt_tokens", "Prompt tokens computed, for all API servers"),
}


class _EngineFigures:
    """A collector over the engines' last statistics, taken at the time of asking."""

    def __init__(self, engines: Callable[[], Sequence[Slot]]) -> None:
        self._engines = engines

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        slots = self._engines()
        up = GaugeMetricFamily("xserve_engine_up", "1: the engine core answers", labels=["engine"])
        for index, slot in enumerate(slots):
            up.add_metric([str(index)], float(slot.engine.alive))
        yield up
        replayed = CounterMetricFamily(
            "xserve_engine_requests_replayed", "Sequences sent again after an engine core was gone", labels=["engine"]
        )
        for index, slot in enumerate(slots):
            replayed.add_metric([str(index)], float(slot.engine.replayed))
        yield replayed
        for field, (name, text) in _GAUGES.items():
            yield _fill(GaugeMetricFamily(name, text, labels=["engine"]), field, slots)
        for field, (name, text) in _COUNTERS.items():
            yield _fill(CounterMetricFamily(name, text, labels=["engine"]), field, slots)


def _fill(family: Any, field: str, slots: Sequence[Slot]) -> Any:
    for index, slot in enumerate(slots):
        family.add_metric([str(index)], float(getattr(slot.engine.stats, field)))
    return family
