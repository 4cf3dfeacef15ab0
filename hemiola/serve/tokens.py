"""Token ids and log-probabilities as the two endpoint families write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hemiola.engine.request import TokenLogprobs
from hemiola.text.detokenize import Detokenizer
from hemiola.text.tokenizer import Tokenizer

LOWEST = -9999.0  # in the place of -inf, which JSON lacks; vLLM's figure


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token alone; one that is no whole characters as "bytes:\\xe2\\x82", so that different ids stay different."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], k: int) -> list[Any]:
    """Entries of choices[].logprobs.content. k: alternatives per token."""
    return [
        {
            **_chat_entry(tokenizer, token, dict(entries)[token]),
            "top_logprobs": [_chat_entry(tokenizer, *entry) for entry in entries[:k]],
        }
        for token, entries in zip(ids, logprobs, strict=True)
    ]


def _chat_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": token_text(tokenizer, token), "logprob": max(logprob, LOWEST), "bytes": list(data)}


class CompletionLogprobs:
    """choices[].logprobs of /v1/completions, made up piece by piece; text offsets run on. k: alternatives."""

    def __init__(self, tokenizer: Tokenizer, k: int, skip_special_tokens: bool) -> None:
        self._tokenizer, self._k = tokenizer, k
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._offset = 0

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The part for these tokens; None for the first of a prompt, which nothing predicts."""
        tokens: list[str] = []
        offsets: list[int] = []
        for token in ids:
            tokens.append(token_text(self._tokenizer, token))
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token))
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if entries is None else max(dict(entries)[token], LOWEST)
                for token, entries in zip(ids, logprobs, strict=True)
            ],
            "top_logprobs": [
                None if entries is None else self._top(token, entries)
                for token, entries in zip(ids, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, chosen: int, entries: TokenLogprobs) -> dict[str, float]:
        """The k best, and the chosen one where it is not among them."""
        shown = [entry for rank, entry in enumerate(entries) if rank < self._k or entry[0] == chosen]
        return {token_text(self._tokenizer, token): max(value, LOWEST) for token, value in shown}


def prompt_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs | None], k: int) -> list[Any]:
    """Per prompt position, id to log-probability, rank (None beyond the k best) and text; None for the first."""
    return [
        None
        if entries is None
        else {
            str(token): {
                "logprob": max(value, LOWEST),
                "rank": rank if rank <= k else None,
                "decoded_token": token_text(tokenizer, token),
            }
            for rank, (token, value) in enumerate(entries, start=1)
        }
        for entries in logprobs
    ]
