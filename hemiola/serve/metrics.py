"""Prometheus metrics. Where the meaning is vLLM's the name is vLLM's, labels included, so that its dashboards work;
what only hemiola has begins with `hemiola:`."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hemiola.serve.loop import EngineLoop, Finish, Job

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
_LABELS = ("model_name", "engine")


class Metrics:
    """Counters and histograms that the event loop fills, and the engine's own figures, read when somebody asks."""

    def __init__(self, loop: EngineLoop, model_name: str) -> None:
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry()
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self.inter_token = self._histogram("vllm:inter_token_latency_seconds", "Between tokens of a choice.", _SECONDS)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _SECONDS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Arrival to first step.", _SECONDS)
        self._inference = self._histogram("vllm:request_inference_time_seconds", "First step to end.", _SECONDS)
        self._prompt_sizes = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output_sizes = self._histogram("vllm:request_generation_tokens", "Tokens of a choice.", _TOKENS)
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens asked for.", _TOKENS)
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success",
            "Finished choices by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._refused = Counter(
            "hemiola:requests_refused", "Refused for load, by limit.", (*_LABELS, "limit"), registry=self._registry
        )
        self._open = Gauge("hemiola:requests_open", "HTTP requests under way.", _LABELS, registry=self._registry)
        self.count_open(0)
        self._registry.register(_EngineFigures(loop, self._labels))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def count_open(self, count: int) -> None:
        self._open.labels(*self._labels).set(count)

    def refused(self, limit: str) -> None:
        self._refused.labels(*self._labels, limit).inc()

    def finished(self, reason: str, count: int = 1) -> None:
        self._success.labels(*self._labels, reason).inc(count)

    def observe_finish(self, job: Job, finish: Finish, num_tokens: int, now: float, arrival_s: float) -> None:
        """A choice ended at `now`."""
        self.finished(finish.reason)
        self._e2e.observe(now - arrival_s)
        if job.scheduled_s is not None:
            self._queue.observe(job.scheduled_s - arrival_s)
            self._inference.observe(now - job.scheduled_s)
        self._prompt_sizes.observe(len(job.prompt_ids))
        self._output_sizes.observe(num_tokens)
        self._max_tokens.observe(job.params.max_tokens)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABELS, buckets=buckets, registry=self._registry).labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self._registry).labels(*self._labels)


class _EngineFigures(Collector):
    """What the engine publishes, as metrics."""

    def __init__(self, loop: EngineLoop, labels: tuple[str, str]) -> None:
        self._loop, self._labels = loop, labels

    def describe(self) -> list[Metric]:
        return []  # collect() is not called when it is registered

    def collect(self) -> Iterator[Metric]:
        snapshot = self._loop.snapshot
        stats = snapshot.stats
        used = stats.blocks_total - stats.blocks_free
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", self._loop.num_waiting)
        part = used / stats.blocks_total if stats.blocks_total else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1.", part)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", stats.prefix.tokens)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix.tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens reused.", stats.prefix.tokens_hit)
        preemptions = stats.preemptions.recomputed + stats.preemptions.swapped
        yield self._counter("vllm:num_preemptions", "Requests that made room.", preemptions)
        yield self._by(
            "hemiola:preemptions",
            "By how their memory came back.",
            "kind",
            {"recompute": stats.preemptions.recomputed, "swap": stats.preemptions.swapped},
        )
        yield self._counter("hemiola:steps", "Engine steps.", stats.num_steps)
        yield self._counter("hemiola:failed_steps", "Steps that raised.", self._loop.num_failed_steps)
        yield self._counter("hemiola:prefill_tokens", "Prompt tokens computed.", stats.num_prefill_tokens)
        yield self._counter("hemiola:decode_tokens", "Tokens computed one at a time.", stats.num_decode_tokens)
        misses = {reason.value: count for reason, count in stats.prefix.misses.items()}
        yield self._by("hemiola:prefix_misses", "Prompts not wholly reused, by reason.", "reason", misses)
        missed = {reason.value: count for reason, count in stats.prefix.tokens_missed.items()}
        yield self._by("hemiola:prefix_missed_tokens", "Tokens in full blocks not reused.", "reason", missed)
        yield self._gauge("hemiola:state_slots", "State slots.", stats.slots_total)
        yield self._gauge("hemiola:state_slots_used", "State slots in use.", stats.slots_total - stats.slots_free)
        yield self._gauge("hemiola:kv_blocks", "KV blocks.", stats.blocks_total)
        yield self._gauge("hemiola:kv_blocks_used", "KV blocks in use.", used)
        yield self._gauge("hemiola:snapshots", "State snapshots held.", stats.snapshots_held)
        yield self._gauge("hemiola:snapshot_bytes", "Bytes of state snapshots.", stats.snapshot_bytes_held)
        yield self._gauge("hemiola:swapped_bytes", "Host bytes of requests that made room.", stats.swapped_bytes)
        yield self._gauge("hemiola:healthy", "1 while steps come.", int(self._loop.healthy))
        calls = CounterMetricFamily(
            "hemiola:op_calls", "Calls by path.", labels=(*_LABELS, "op", "arm", "variant", "reason")
        )
        fallbacks: Tally[str] = Tally()
        for path, count in snapshot.paths.items():
            calls.add_metric((*self._labels, *path), count)
            fallbacks[path.op] += count if path.reason else 0
        yield calls
        yield self._by("hemiola:fallback_calls", "Calls that another arm than the asked took.", "op", fallbacks)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _by(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*_LABELS, label))
        for value, count in values.items():
            family.add_metric((*self._labels, value), count)
        return family
