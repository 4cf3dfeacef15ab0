"""The process around the application: uvicorn, with a drain when it is told to end."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from hemiola.serve.app import build_app
from hemiola.serve.service import Service

_GRACE_SECONDS = 5.0  # for streams that were just ended to send their last event


class Server(uvicorn.Server):
    """Serves one service until SIGTERM or SIGINT; then lets running requests finish, up to the drain limit."""

    def __init__(self, service: Service) -> None:
        self._service = service
        config = service.config
        super().__init__(
            uvicorn.Config(
                build_app(service),
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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.ensure_future(self._service.drain())
        await super().shutdown(sockets)
        drain.cancel()
