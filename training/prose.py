"""Turns markup into running English: plain paragraphs, one space between words, ASCII quotation marks and dashes.

Knows HTML, OSIS (the SWORD modules) and reStructuredText well enough to keep prose and drop tables and code.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser

_OSIS_BREAK = r'<(?:div|lg|l|p|lb|chapter)\b[^>]*type="x-p"[^>]*>|<hi type="bold">Verses? [^<]*</hi>'
_TYPOGRAPHY = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u2015": "--",
        "\u2026": "...", "\u00a0": " ", "\u00ad": None, "\u2011": "-", "\u2010": "-", "\ufeff": None, "\u200b": None,
    }
)  # fmt: skip


def tidy(text: str) -> str:
    """One paragraph on one line, in plain typography."""
    text = text.translate(_TYPOGRAPHY)
    text = re.sub(r"\b_|_\b", "", text)  # _emphasis_ of plain-text books
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" ([,.;:?!])(?=\s|$)", r"\1", text)
    text = re.sub(r" ([)\]])", r"\1", text)
    return re.sub(r"([(\[]) ", r"\1", text)


def paragraphs(text: str) -> list[str]:
    """Paragraphs of a plain-text document in which blank lines separate them."""
    return [clean for block in re.split(r"\n\s*\n", text) if (clean := tidy(block))]


def is_prose(paragraph: str, min_words: int = 12) -> bool:
    """Whether a paragraph reads as English sentences (not a table row, a heading, a listing or a foreign quotation)."""
    words = paragraph.split()
    if len(words) < min_words or paragraph[-1] not in ".?!:\"')":
        return False
    plain = sum(c.isascii() and (c.isalpha() or c in " ,.;'") for c in paragraph)
    odd = sum(c in "_=<>{}|\\/@#$%^*+[]~`" for c in paragraph)
    digits = sum(c.isdigit() for c in paragraph)
    return plain >= 0.94 * len(paragraph) and odd <= 0.008 * len(paragraph) and digits <= 0.02 * len(paragraph)


class _HtmlParagraphs(HTMLParser):
    """Collects the text of paragraph-like elements outside of code, tables and navigation."""

    _PARAGRAPH = frozenset({"p", "dd", "li", "blockquote", "div", "section", "h1", "h2", "h3", "h4", "dt", "body"})
    _DROPPED = frozenset({"pre", "table", "script", "style", "nav", "head", "svg", "form", "button"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._text: list[str] = []
        self._dropped: list[str] = []

    def _flush(self) -> None:
        if clean := tidy("".join(self._text)):
            self.found.append(clean)
        self._text.clear()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._DROPPED:
            self._dropped.append(tag)
        elif tag in self._PARAGRAPH:
            self._flush()

    def handle_endtag(self, tag: str) -> None:
        if self._dropped and tag == self._dropped[-1]:
            self._dropped.pop()
        elif tag in self._PARAGRAPH:
            self._flush()

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            self._text.append(data)

    def close(self) -> None:
        super().close()
        self._flush()


def html_paragraphs(text: str) -> list[str]:
    """Paragraphs of an HTML page, without listings, tables and navigation."""
    parser = _HtmlParagraphs()
    parser.feed(text)
    parser.close()
    return parser.found


def osis_chapters(text: str) -> Iterator[tuple[str, list[str]]]:
    """(osisID of the chapter, its paragraphs) of one book in OSIS markup; notes, tables and titles are dropped."""
    text = re.sub(r"<note\b.*?</note>|<table\b.*?</table>|<title\b.*?</title>|<reference[^>]*/>", " ", text, flags=re.S)
    parts = re.split(r'<chapter [^>]*osisID="([^"]+)"[^>]*>', text)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        body = re.sub(_OSIS_BREAK, "\n\n", body)
        body = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"<(?:l|lb|lg)\b[^>]*>", " ", body)))
        yield name, paragraphs(body)


def rst_paragraphs(text: str) -> list[str]:
    """Unindented paragraphs of a reStructuredText page with the inline markup resolved."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        if block[:1].isspace() or block.startswith(("..", "+-", "==", "|")):
            continue
        block = re.sub(r":[\w:+-]+:`~?!?([^`<]+?)(?:\s*<[^>]*>)?`", r"\1", block)
        block = re.sub(r"`([^`<]+?)\s*<[^>]*>`__?", r"\1", block)
        block = re.sub(r"``?([^`]+)``?_?", r"\1", block)
        found.append(tidy(re.sub(r"\*\*?([^*]+)\*\*?", r"\1", block)))
    return found


def keep_prose(found: Iterable[str], min_words: int = 12) -> str:
    """The prose among paragraphs as one document, blank lines between them; repeated paragraphs once."""
    return "\n\n".join(dict.fromkeys(p for p in found if is_prose(p, min_words)))
