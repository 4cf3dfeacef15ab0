"""Ids to text while they arrive, never showing a character before all of its bytes are there."""

from __future__ import annotations

from hemiola.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_BYTES = 4  # of a character in UTF-8
_MAX_OPEN_IDS = 8  # that are decoded again with each that follows


class Detokenizer:
    """One answer's ids, decoded incrementally: the pieces joined equal the tokenizer's decoding of all ids.

    A decoded text that ends in U+FFFD may end in the middle of a character. At most its last character is then open
    (a cut-off character is one replacement mark), so everything before it goes out, and the ids are decoded again
    together with the next. Where the text does not end so, a character ends there, and for a byte-level tokenizer the
    ids so far can be forgotten. Where broken bytes let it end so again and again, the last four ids that have bytes are
    kept: whatever stood before them, decoding begins anew at the first byte that continues no character, or, where all
    of them might continue one, at the fourth, since no character is that long. Other tokenizers decode all ids each
    time, because their text may depend on what stands before.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._pending_ids: list[int] = []
        self._num_shown = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain; may be empty."""
        self._pending_ids.append(token_id)
        text = self._text(self._pending_ids)
        is_open = text.endswith(_REPLACEMENT)
        piece = text[self._num_shown : -1 if is_open else None]
        if self._tokenizer.is_byte_level and not is_open:
            self._pending_ids.clear()
            self._num_shown = 0
        else:
            self._num_shown += len(piece)
        if self._tokenizer.is_byte_level and len(self._pending_ids) > _MAX_OPEN_IDS:
            self._pending_ids = [i for i in self._pending_ids if self._text([i])][-_MAX_BYTES:]
            self._num_shown = len(self._text(self._pending_ids)) - 1
        return piece

    def finish(self) -> str:
        """What is left when no id follows: the replacement mark of an unfinished character, or nothing."""
        return self._text(self._pending_ids)[self._num_shown :]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)
