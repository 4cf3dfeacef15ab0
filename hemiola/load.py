"""Load on an OpenAI-compatible server, and what its clients see: times to first token, between tokens, to the end.

Closed loop: so many clients, each of which asks again when it has its answer. Open loop: requests at given times,
whatever the server does. Prompts are seeded random words, so every server gets the same ones; where they share a
prefix, it is one of a few. The client is one event loop over plain sockets, which is cheap enough not to be what is
measured: `client_s` in the report says how busy it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hemiola.errors import ConfigError, HemiolaError

ARRIVALS = ("poisson", "fixed")
PERCENTILES = (50, 90, 95, 99)
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power"
).split()


class LoadError(HemiolaError):
    """The server cannot be reached, or does not answer as an OpenAI-compatible one."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """url: of the server, without /v1. model: None asks the server. chat: /v1/chat/completions, not /v1/completions.

    num_requests: in all. concurrency: clients of a closed loop; rate_per_s: arrivals of an open loop, with `arrivals`
        between them exponential (poisson) or equal (fixed). One of the two is given.
    prompt_words: (words, weight) of the mix; a word is a token for most tokenizers, or two. shared_words: of a prefix,
        on top; num_prefixes: different ones.
    output_tokens: asked of every answer. ignore_eos: ask for exactly so many; only vLLM's relatives know it.
    abandon: part of the requests whose client leaves, at random in the first half of the answer.
    seed: of prompts, arrivals and who leaves.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    chat: bool = False
    num_requests: int = 64
    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: str = "poisson"
    prompt_words: tuple[tuple[int, float], ...] = ((256, 1.0),)
    shared_words: int = 0
    num_prefixes: int = 1
    output_tokens: int = 64
    temperature: float = 0.0
    ignore_eos: bool = False
    abandon: float = 0.0
    timeout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate_per_s is None):
            raise ConfigError("closed loop or open loop?", expected="one of concurrency and rate_per_s")
        if self.arrivals not in ARRIVALS:
            raise ConfigError(
                "unknown value", found=self.arrivals, expected=f"one of {', '.join(ARRIVALS)}", where="arrivals"
            )
        for name in ("num_requests", "concurrency", "rate_per_s", "num_prefixes", "output_tokens", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError("not positive", found=value, expected="> 0", where=name)
        if not self.prompt_words or any(count < 1 or not weight > 0 for count, weight in self.prompt_words):
            raise ConfigError("not a mix", found=self.prompt_words, expected="words and weights", where="prompt_words")
        if not 0 <= self.abandon <= 1:
            raise ConfigError("not a part", found=self.abandon, expected="0 to 1", where="abandon")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("not a URL of a server", found=self.url, expected="http://host:port", where="url")


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send. at_s: after the start, in an open loop. leave_after: pieces of the answer; None stays."""

    prompt: str
    at_s: float
    leave_after: int | None


@dataclass(slots=True)
class Outcome:
    """What became of one request; times are seconds after the start. late_s: sent so much later than planned.

    first_s: first piece of the answer. gaps_s: between the pieces that follow.
    outcome: "finished", "abandoned", or what went wrong.
    """

    sent_s: float
    late_s: float
    first_s: float | None = None
    end_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """seconds: from the first request to the end of the last. client_s: processor time of this client."""

    options: LoadOptions
    model: str
    seconds: float
    client_s: float
    outcomes: list[Outcome]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; without the API key."""
        finished = [o for o in self.outcomes if o.outcome == "finished"]
        tokens = {name: _sum(getattr(o, name) for o in finished) for name in _TOKENS}
        options = asdict(self.options)
        del options["api_key"]
        return {
            "options": options,
            "model": self.model,
            "seconds": self.seconds,
            "client_s": self.client_s,
            "outcomes": dict(Counter(o.outcome for o in self.outcomes)),
            "requests_per_s": len(finished) / self.seconds,
            **tokens,
            "output_tokens_per_s": None if tokens["output_tokens"] is None else tokens["output_tokens"] / self.seconds,
            "latencies_s": {name: _summary(values) for name, values in self.latencies().items()},
            "requests": [asdict(o) for o in self.outcomes],
        }

    def latencies(self) -> dict[str, list[float]]:
        """Seconds by kind, each sorted; of finished requests. per_token: the mean of a request after its first."""
        finished = [o for o in self.outcomes if o.outcome == "finished" and o.first_s is not None]
        per_token = [
            (o.end_s - o.first_s) / (o.output_tokens - 1)
            for o in finished
            if o.end_s is not None and o.first_s is not None and o.output_tokens is not None and o.output_tokens > 1
        ]
        values = {
            "first_token": [o.first_s - o.sent_s for o in finished if o.first_s is not None],
            "between_pieces": [gap for o in finished for gap in o.gaps_s],
            "per_token": per_token,
            "end_to_end": [o.end_s - o.sent_s for o in finished if o.end_s is not None],
            "late": [o.late_s for o in self.outcomes],
        }
        return {name: sorted(times) for name, times in values.items()}


_TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")


def plan_requests(options: LoadOptions) -> Iterator[Planned]:
    """The same for the same options, whatever the server."""
    rng = random.Random(options.seed)
    prefixes = [_words(rng, options.shared_words) for _ in range(options.num_prefixes)]
    sizes, weights = zip(*options.prompt_words, strict=True)
    at_s = 0.0
    for _ in range(options.num_requests):
        (size,) = rng.choices(sizes, weights)
        prompt = " ".join(filter(None, (rng.choice(prefixes), _words(rng, size))))
        leaves = rng.random() < options.abandon
        yield Planned(prompt, at_s, rng.randrange(max(1, options.output_tokens // 2)) if leaves else None)
        if options.rate_per_s is not None:
            is_random = options.arrivals == "poisson"
            at_s += rng.expovariate(options.rate_per_s) if is_random else 1 / options.rate_per_s


async def run_load(options: LoadOptions) -> LoadReport:
    """Send everything and wait for it. Raises: LoadError when there is no such server."""
    model = options.model or await _first_model(options)
    outcomes: list[Outcome] = []
    start_s, client_s = time.perf_counter(), time.process_time()

    async def send(planned: Planned) -> None:
        outcome = Outcome(0.0, 0.0)
        outcomes.append(outcome)
        await _send(options, model, planned, start_s, outcome)

    if options.concurrency is not None:
        planned = plan_requests(options)

        async def client() -> None:
            for request in planned:
                await send(request)

        await asyncio.gather(*(client() for _ in range(options.concurrency)))
    else:
        tasks = []
        for request in plan_requests(options):
            await asyncio.sleep(max(0.0, start_s + request.at_s - time.perf_counter()))
            tasks.append(asyncio.ensure_future(send(request)))
        await asyncio.gather(*tasks)
    seconds = time.perf_counter() - start_s
    return LoadReport(options, model, seconds, time.process_time() - client_s, outcomes)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that so much of the values is not above (nearest rank). ordered: not empty."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


async def _send(options: LoadOptions, model: str, planned: Planned, start_s: float, outcome: Outcome) -> None:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": options.output_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {"ignore_eos": True} if options.ignore_eos else {}
    if options.chat:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": planned.prompt}]
    else:
        path, body["prompt"] = "/v1/completions", planned.prompt
    outcome.sent_s = time.perf_counter() - start_s
    outcome.late_s = outcome.sent_s - planned.at_s if options.rate_per_s is not None else 0.0
    try:
        async with asyncio.timeout(options.timeout_s):
            await _read_answer(options, path, body, planned.leave_after, start_s, outcome)
    except TimeoutError:
        outcome.outcome = "timeout"
    except (OSError, LoadError, asyncio.IncompleteReadError) as error:
        outcome.outcome = str(error) if isinstance(error, LoadError) else type(error).__name__


async def _read_answer(
    options: LoadOptions, path: str, body: dict[str, Any], leave_after: int | None, start_s: float, outcome: Outcome
) -> None:
    num_pieces, last_s, is_done = 0, 0.0, False
    async with contextlib.aclosing(_lines(options, path, body)) as lines:
        if leave_after == 0:
            await anext(lines, None)
            outcome.outcome = "abandoned"
            return
        async for line in lines:
            if line == "data: [DONE]":
                is_done = True
                break
            if not line.startswith("data: "):
                continue
            entry = json.loads(line[6:])
            if "error" in entry:
                raise LoadError("error in the stream", found=str(entry["error"])[:200])
            if (usage := entry.get("usage")) is not None:
                outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            if not any(_has_text(choice) for choice in entry["choices"]):
                continue
            now_s = time.perf_counter() - start_s
            if num_pieces:
                outcome.gaps_s.append(now_s - last_s)
            else:
                outcome.first_s = now_s
            num_pieces, last_s = num_pieces + 1, now_s
            if leave_after is not None and num_pieces >= leave_after:
                outcome.outcome = "abandoned"
                return
    outcome.end_s = time.perf_counter() - start_s
    outcome.outcome = "finished" if is_done else "the stream broke off"


def _has_text(choice: dict[str, Any]) -> bool:
    if "text" in choice:
        return bool(choice["text"])
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


async def _first_model(options: LoadOptions) -> str:
    try:
        async with asyncio.timeout(30), contextlib.aclosing(_lines(options, "/v1/models", None)) as lines:
            answer = json.loads("".join([line async for line in lines]))
        return str(answer["data"][0]["id"])
    except (OSError, TimeoutError, ValueError, LookupError, TypeError, asyncio.IncompleteReadError) as error:
        raise LoadError(
            "no OpenAI-compatible server", found=f"{type(error).__name__}: {error}", where=options.url
        ) from error


async def _lines(options: LoadOptions, path: str, body: dict[str, Any] | None) -> AsyncGenerator[str, None]:
    """The lines of an answer's body as they come. body: posted as JSON; None gets. Raises: LoadError for a status that
    is not 200."""
    url = urlsplit(options.url)
    context = ssl.create_default_context() if url.scheme == "https" else None
    port = url.port or (443 if context else 80)
    reader, writer = await asyncio.open_connection(url.hostname, port, ssl=context, limit=1 << 24)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{'GET' if body is None else 'POST'} {url.path.rstrip('/')}{path} HTTP/1.1",
            f"host: {url.netloc}",
            "connection: close",
            "content-type: application/json",
            f"content-length: {len(data)}",
        ]
        head += [f"authorization: Bearer {options.api_key}"] if options.api_key else []
        writer.write("\r\n".join([*head, "", ""]).encode() + data)
        status, headers = await _read_head(reader)
        rest = b""
        async for piece in _body(reader, headers):
            *lines, rest = (rest + piece).split(b"\n")
            if status == 200:
                for line in lines:
                    yield line.decode().rstrip("\r")
            else:
                rest = b"\n".join([*lines, rest])
        if status != 200:
            raise LoadError(f"status {status}", found=rest.decode(errors="replace")[:200])
        if rest:
            yield rest.decode()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.strip().lower(): value.strip() for name, _, value in fields}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        length = headers.get("content-length")
        yield await reader.read() if length is None else await reader.readexactly(int(length))
        return
    while size := int((await reader.readline()).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def _sum(values: Iterator[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _summary(ordered: Sequence[float]) -> dict[str, float] | None:
    if not ordered:
        return None
    shown = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **shown, "max": ordered[-1], "count": len(ordered)}
