"""Text of an answer in which a chat format's marks are told from the same words in prose, and matching over it.

A mark that is a token of its own (<think> and <tool_call> in Nemotron-3) counts only where the model said that id; the
same characters spelled by ordinary tokens are prose. Marks that are no tokens (v2's <think>, all of <parameter=...>)
are known by their text alone.
"""

from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hemiola.text.detokenize import Detokenizer
from hemiola.text.tokenizer import Tokenizer

MAX_NAME = 256  # longer names are text, so that what is withheld stays short
_NAME = re.compile(r"[^<>\n]*")
_SPACE = re.compile(r"\s*")


class MarkedText:
    """What is not yet consumed of an answer.

    text: the text, with the marks written out also where decoding has dropped them as special tokens.
    marks: the words that may be marks.
    tokenizer, skip_special_tokens: of the request; without a tokenizer every occurrence of a mark counts.
    """

    def __init__(self, marks: Sequence[str], tokenizer: Tokenizer | None, skip_special_tokens: bool) -> None:
        self.text = ""
        self._start = 0  # place of text[0] in the whole answer
        self._places: set[int] = set()  # of the marks said by id, in the whole answer
        self._mark_of_id: dict[int, str] = {}
        for mark in marks if tokenizer is not None else ():
            ids = tokenizer.encode(mark, add_special_tokens=False) if tokenizer is not None else []
            if len(ids) == 1:
                self._mark_of_id[ids[0]] = mark
        self._by_id = frozenset(self._mark_of_id.values())
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens) if tokenizer and self._mark_of_id else None
        self._num_decoded = self._num_received = 0
        self._said: deque[tuple[int, str, bool]] = deque()  # (place in the decoded text, mark, whether written there)

    def push(self, text: str, ids: Sequence[int]) -> None:
        """Add text; `ids` are the new ids, of which the text may lag behind but not run ahead."""
        if self._detokenizer is not None:
            for token_id in ids:
                self._decode(self._detokenizer, token_id)
        while self._said and self._said[0][0] <= self._num_received + len(text):
            place, mark, is_written = self._said.popleft()
            before, text = text[: place - self._num_received], text[place - self._num_received :]
            self.text += before
            self._num_received += len(before)
            self._places.add(self._start + len(self.text))
            if not is_written:
                self.text += mark
        self.text += text
        self._num_received += len(text)

    def take(self, count: int) -> str:
        """Consume and return the first `count` characters."""
        taken, self.text = self.text[:count], self.text[count:]
        self._start += count
        if self._places:
            self._places = {place for place in self._places if place >= self._start}
        return taken

    def is_mark(self, position: int, mark: str) -> bool:
        """Whether `mark`, which stands at text[position], is meant as one."""
        return mark not in self._by_id or self._start + position in self._places

    def _decode(self, detokenizer: Detokenizer, token_id: int) -> None:
        piece = detokenizer.push(token_id)
        self._num_decoded += len(piece)
        if (mark := self._mark_of_id.get(token_id)) is not None:
            is_written = piece.endswith(mark)
            self._said.append((self._num_decoded - len(mark) * is_written, mark, is_written))


class Part(enum.Enum):
    """What a pattern may hold beside words. SPACE: any white space or none. NAME: some characters without <, > and
    newlines. END: the answer's end. EOS: its end, and it was not cut off."""

    SPACE = enum.auto()
    NAME = enum.auto()
    END = enum.auto()
    EOS = enum.auto()


@dataclass(frozen=True, slots=True)
class Match:
    """end: where it ends. name: what its NAME was."""

    end: int
    name: str = ""


class Open(enum.Enum):
    """Not decided: more text could make it a match."""

    OPEN = enum.auto()


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known of the answer's end. final: no more text comes. cut: it was cut off, by a limit or a withdrawal."""

    final: bool = False
    cut: bool = False


Pattern = tuple[str | Part, ...]


def match_at(tape: MarkedText, position: int, pattern: Pattern, ending: Ending) -> Match | Open | None:
    """Match at text[position]. Words that are marks have to be meant as marks; nothing is tried twice."""
    text, name = tape.text, ""
    for part in pattern:
        at_end = position == len(text)
        if part is Part.SPACE:
            found = _SPACE.match(text, position)
            position = found.end() if found else position
        elif part is Part.NAME:
            found = _NAME.match(text, position, position + MAX_NAME)
            name = found.group() if found else ""
            position += len(name)
            if position == len(text) and len(name) < MAX_NAME:
                return None if ending.final else Open.OPEN
            if not name:
                return None
        elif isinstance(part, Part):
            if not at_end or (ending.final and ending.cut and part is Part.EOS):
                return None
            if not ending.final:
                return Open.OPEN
        elif text.startswith(part, position):
            if not tape.is_mark(position, part):
                return None
            position += len(part)
        else:
            is_open = not ending.final and part.startswith(text[position : position + len(part)])
            return Open.OPEN if is_open and len(text) - position < len(part) else None
    return Match(position, name)


def match_any(tape: MarkedText, position: int, patterns: Sequence[Pattern], ending: Ending) -> Match | Open | None:
    """The first of the patterns that matches; open as long as none does and one still could."""
    results = [match_at(tape, position, pattern, ending) for pattern in patterns]
    matches = [result for result in results if isinstance(result, Match)]
    return matches[0] if matches else Open.OPEN if Open.OPEN in results else None


def find_word(text: str, start: int, words: Sequence[str], final: bool) -> tuple[int, str | None]:
    """The first place from `start` where one of the words stands, and the word.

    All words begin with "<". Where the text ends inside of what may be one, that place with None; without any,
    the text's end with None.
    """
    position = text.find("<", start)
    while position >= 0:
        for word in words:
            if text.startswith(word, position):
                return position, word
        is_near_end = not final and len(text) - position < MAX_NAME
        if is_near_end and any(word.startswith(text[position:]) for word in words):
            return position, None
        position = text.find("<", position + 1)
    return len(text), None
