"""Ids to text while they arrive, never showing a character before all of its bytes are there."""

from __future__ import annotations

from hemiola.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """One answer's ids, decoded incrementally: the pieces joined equal the tokenizer's decoding of all ids.

    A decoded text that ends in U+FFFD may end in the middle of a character. At most its last character is then open
    (a cut-off character is one replacement mark), so everything before it goes out, and the ids are decoded again
    together with the next. Where the text does not end so, a character ends there, and for a byte-level tokenizer the
    ids so far can be forgotten. Other tokenizers decode all ids each time, because their text may depend on what
    stands before.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._pending_ids: list[int] = []
        self._num_shown = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain; may be empty."""
        self._pending_ids.append(token_id)
        text = self._decode()
        is_open = text.endswith(_REPLACEMENT)
        piece = text[self._num_shown : -1 if is_open else None]
        if self._tokenizer.is_byte_level and not is_open:
            self._pending_ids.clear()
            self._num_shown = 0
        else:
            self._num_shown += len(piece)
        return piece

    def finish(self) -> str:
        """What is left when no id follows: the replacement mark of an unfinished character, or nothing."""
        return self._decode()[self._num_shown :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._pending_ids, self._skip_special_tokens)
