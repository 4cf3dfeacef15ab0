"""ServeConfig: every setting of the server that is no setting of the engine, with its one default."""

from __future__ import annotations

from dataclasses import dataclass

from hemiola.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Settings of one server.

    host, port: what it listens on; only this machine unless told otherwise. Port 0 takes a free one.
    api_keys: any of them is accepted as a bearer token; none means that no key is asked for.
    allowed_origins: web pages of these origins may call it (CORS); none by default.
    served_model_name: what clients call the model; None is the name it was loaded by.
    max_body_bytes: of one request; more is refused with 413 before it is read.
    max_prompt_tokens: of one prompt; more is refused with 413. None leaves it to the model's own length.
    max_prompts, max_choices: prompts of one completion request, and choices over all of them.
    max_logprobs: alternatives per token that a request may ask for.
    max_waiting: requests that wait for their first step; max_streams: requests under way. More are refused with 429.
    retry_after_s: what a refused client is told to wait.
    drain_seconds: after SIGTERM, running requests get so long to finish.
    log_requests: prompts and answers may appear in the log.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    served_model_name: str | None = None
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None
    max_prompts: int = 64
    max_choices: int = 64
    max_logprobs: int = 20
    max_waiting: int = 256
    max_streams: int = 512
    retry_after_s: int = 1
    drain_seconds: float = 30.0
    log_requests: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError("not a port", found=self.port, expected="0 to 65535", where="port")
        for name in ("max_body_bytes", "max_prompts", "max_choices", "max_waiting", "max_streams", "retry_after_s"):
            if getattr(self, name) < 1:
                raise ConfigError("not a positive count", found=getattr(self, name), expected=">= 1", where=name)
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ConfigError(
                "not a positive count", found=self.max_prompt_tokens, expected=">= 1", where="max_prompt_tokens"
            )
        for name in ("max_logprobs", "drain_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError("negative", found=getattr(self, name), expected=">= 0", where=name)
        if any(not key for key in self.api_keys):
            raise ConfigError("an empty API key", expected="keys of at least one character", where="api_keys")
