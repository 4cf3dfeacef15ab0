"""OpenTelemetry traces: a span per HTTP request, as FastAPI makes them, sent by OTLP. An extra (`hemiola[otel]`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hemiola.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def tracer_provider() -> TracerProvider:
    """Sends spans to where the OTEL_* environment variables say, by default to a collector on this machine.

    Raises: ConfigError where the packages are not installed; FastAPI makes spans since 0.165 at the latest.
    """
    try:
        import fastapi.telemetry  # noqa: F401
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the packages for traces are not installed", found=f"no {error.name}", remedy="pip install 'hemiola[otel]'"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "hemiola"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
