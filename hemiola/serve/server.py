"""The process around the application: uvicorn, with a drain when it is told to end."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from typing import TYPE_CHECKING

import uvicorn

from hemiola import __version__
from hemiola.serve.app import build_app
from hemiola.serve.service import Service
from hemiola.text.chat_output import chat_format

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

# The engine's thread asks for the interpreter after every wait for the device; what holds it lets go this soon.
SWITCH_SECONDS = 0.0005
_GRACE_SECONDS = 5.0  # for streams that were just ended to send their last event
log = logging.getLogger("hemiola.serve")


class Server(uvicorn.Server):
    """Serves one service until SIGTERM or SIGINT; then lets running requests finish, up to the drain limit."""

    def __init__(self, service: Service, tracer_provider: TracerProvider | None = None) -> None:
        self._service = service
        config = service.config
        super().__init__(
            uvicorn.Config(
                build_app(service, tracer_provider),
                host=config.host,
                port=config.port,
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=int(config.drain_seconds + _GRACE_SECONDS),
                timeout_keep_alive=30,
            )
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on, once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return host, port

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve in a process of its own. What it holds by now, it holds to its end, and garbage collection is told so:
        a full one would look through all of it, for a tenth of a second in which neither streams nor steps go on."""
        gc.collect()
        gc.freeze()
        super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        await super().startup(sockets)
        if self.started:
            self._log_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("draining", extra={"fields": {"seconds": self._service.config.drain_seconds}})
        drain = asyncio.ensure_future(self._service.drain())
        await super().shutdown(sockets)
        drain.cancel()
        log.info("stopped")

    def _log_start(self) -> None:
        service = self._service
        source = service.tokenizer.chat_template_source(with_tools=True) if service.tokenizer else None
        form = chat_format(source)
        host, port = self.address
        fields = {
            "version": __version__,
            "url": f"http://{f'[{host}]' if ':' in host else host}:{port}",
            "model": service.model_name,
            "max_model_len": service.engine.max_model_len,
            "chat_template": source is not None,
            "reasoning": form.reasoning,
            "tools": form.tools,
            "api_keys": len(service.config.api_keys),
        }
        log.info("listening", extra={"fields": fields})
