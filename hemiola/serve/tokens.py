"""Token ids and log-probabilities as the two endpoint families write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hemiola.engine.request import TokenLogprobs
from hemiola.text.detokenize import Detokenizer
from hemiola.text.tokenizer import Tokenizer

LOWEST = -9999.0  # in the place of -inf, which JSON lacks; vLLM's figure
TokenName = Callable[[int], str]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token alone; one that is no whole characters as "bytes:\\xe2\\x82", so that different ids stay different."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_id_text(token_id: int) -> str:
    """A token for clients that ask for ids in the place of texts: vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def token_name(tokenizer: Tokenizer, as_id: bool | None) -> TokenName:
    return token_id_text if as_id else partial(token_text, tokenizer)


def chat_logprobs(
    tokenizer: Tokenizer, name: TokenName, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], k: int
) -> list[Any]:
    """Entries of choices[].logprobs.content. k: alternatives per token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token), "logprob": max(logprob, LOWEST), "bytes": list(tokenizer.token_bytes(token))}

    return [
        {**entry(token, dict(entries)[token]), "top_logprobs": [entry(*other) for other in entries[:k]]}
        for token, entries in zip(ids, logprobs, strict=True)
    ]


class CompletionLogprobs:
    """choices[].logprobs of /v1/completions, made up piece by piece; text offsets run on.

    k: alternatives. detokenizer: of the text that is shown; None where there is no text.
    """

    def __init__(self, name: TokenName, k: int, detokenizer: Detokenizer | None) -> None:
        self._name, self._k, self._detokenizer = name, k, detokenizer
        self._offset = 0

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The part for these tokens; None for the first of a prompt, which nothing predicts."""
        tokens: list[str] = []
        offsets: list[int] = []
        for token in ids:
            tokens.append(self._name(token))
            offsets.append(self._offset)
            if self._detokenizer is not None:
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
        return {self._name(token): max(value, LOWEST) for token, value in shown}


def prompt_logprobs(tokenizer: Tokenizer | None, logprobs: Sequence[TokenLogprobs | None], k: int) -> list[Any]:
    """Per prompt position, id to log-probability, rank (None beyond the k best) and text (None without a tokenizer);
    None for the first."""
    return [
        None
        if entries is None
        else {
            str(token): {
                "logprob": max(value, LOWEST),
                "rank": rank if rank <= k else None,
                "decoded_token": None if tokenizer is None else token_text(tokenizer, token),
            }
            for rank, (token, value) in enumerate(entries, start=1)
        }
        for entries in logprobs
    ]
