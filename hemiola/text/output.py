"""The text of one answer while its ids arrive: detokenised, cut at the first stop string, safe to stream."""

from __future__ import annotations

from collections.abc import Iterable

from hemiola.config.sampling import SamplingParams
from hemiola.text.detokenize import Detokenizer
from hemiola.text.stop import StopMatcher
from hemiola.text.tokenizer import Tokenizer


class OutputText:
    """One answer's text. What `push` and `finish` return, joined, is `text`, however the ids are cut into pushes.

    text: the answer so far, as far as it is certain; no part of a stop string is in it, unless the request asks for
        the stop string itself to be included.
    num_tokens: ids that count; those after the id that completed a stop string do not.
    stopped: the stop string that ended the answer, or None. The caller then ends the request.

    Stop strings do not end an answer before `min_tokens` ids: text up to there is not searched.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self.text = ""
        self.num_tokens = 0

    @property
    def stopped(self) -> str | None:
        return self._matcher.hit

    def push(self, token_ids: Iterable[int], *, ends: bool = False) -> str:
        """Take new ids and return the text to show for them.

        ends: the last of them is an id that ended the request (eos or one of stop_token_ids); it counts, but its text
            is no part of the answer, unless the request asks for stops to be included.
        """
        ids = list(token_ids)
        silent_at = len(ids) - 1 if ends and not self._include_stop else None
        text = ""
        for i, token_id in enumerate(ids):
            if self.stopped is not None:
                break
            self.num_tokens += 1
            if i == silent_at:
                break
            piece = self._detokenizer.push(token_id)
            text += piece if self.num_tokens <= self._min_tokens else self._match(piece)
        self.text += text
        return text

    def finish(self) -> str:
        """The rest of the text, when no more ids come: what was withheld, and the mark of an unfinished character."""
        if self.stopped is not None:
            return ""
        text = self._match(self._detokenizer.finish())
        text += self._matcher.finish()
        self.text += text
        return text

    def _match(self, piece: str) -> str:
        text = self._matcher.push(piece)
        return text + self.stopped if self.stopped is not None and self._include_stop else text
