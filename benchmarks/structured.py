"""Compile time and time per token of libraries for structured output: python -m benchmarks.structured

On the shipped model's tokenizer and on a made-up byte-level vocabulary of 131,072 entries (the size of Nemotron-3's),
each with a walk along given JSON (longest tokens first) and one that draws from the allowed tokens. Libraries that are
not installed are left out. CPU time of one thread. The last line is a JSON document.
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hemiola.loading import shipped_model


def record_of(**properties: object) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT = {"type": "string"}
ADDRESS = record_of(street=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"})
ITEM = record_of(id={"type": "integer", "minimum": 0}, tags={"type": "array", "items": TEXT}, address=ADDRESS)
WIDE = {f"field_{i}": {"type": ["string", "number", "null"]} for i in range(100)}
# Schemas, each with a value of it.
SCHEMAS: dict[str, tuple[dict[str, Any], Any]] = {
    "flat": (
        record_of(name=TEXT, age={"type": "integer"}, kind={"enum": ["a", "b"]}),
        {"name": 'Some Body with a "name"', "age": 41, "kind": "b"},
    ),
    "nested": (
        record_of(items={"type": "array", "items": ITEM}),
        {
            "items": [
                {"id": i, "tags": ["one", "two words"], "address": {"street": "A road", "zip": "12345"}}
                for i in range(8)
            ]
        },
    ),
    "wide": (
        {"type": "object", "properties": WIDE, "additionalProperties": False},
        {name: "text" if i % 2 else 1.5 for i, name in enumerate(WIDE)},
    ),
    "any object": ({"type": "object"}, {"a": {"b": [1, 2.5e3, None, True, "text"]}, "c": "more text here"}),
}


def made_up_vocabulary(size: int = 131_072, num_special: int = 1000) -> list[bytes]:
    """Special tokens, all bytes, then the most common words and beginnings of words of Python's own library, with and
    without a space before, and pairs of Chinese characters until it is full."""
    words: Counter[str] = Counter()
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))[:3000]:
        text = file.read_text(encoding="utf-8", errors="ignore")
        words.update(word for word in text.replace("(", " (").replace(".", " .").split() if len(word) < 20)
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    pieces = ["  ", "    ", "\n\n", '"', '":', '": "', '", "', '"},', "}, {", "[]", "{}", '{"']
    for word, _ in words.most_common(60_000):
        pieces += [word, " " + word, word[:3], word[:5]]
    pieces += [chr(a) + chr(b) for a in range(0x4E00, 0x4E00 + 400) for b in range(0x4E00, 0x4E00 + 300)]
    for piece in pieces:
        if len(tokens) == size - num_special:
            break
        tokens[piece.encode()] = None
    return [b""] * num_special + list(tokens)


def shipped_vocabulary() -> list[bytes]:
    """The shipped model's tokens as bytes; special ones as nothing."""
    state = json.loads((shipped_model() / "tokenizer.json").read_text(encoding="utf-8"))
    bytes_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    vocabulary = [b""] * len(state["model"]["vocab"])
    for text, token_id in state["model"]["vocab"].items():
        vocabulary[token_id] = bytes(bytes_of[character] for character in text)
    for token in state["added_tokens"]:
        vocabulary[token["id"]] = b""
    return vocabulary


def byte_alphabet() -> list[str]:
    """The characters in which byte-level tokenizers write bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def definition(vocabulary: list[bytes]) -> str:
    """A tokenizer.json with these tokens; those without text are special."""
    alphabet = byte_alphabet()
    names = ["".join(alphabet[byte] for byte in token) or f"<|{i}|>" for i, token in enumerate(vocabulary)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([name for name, token in zip(names, vocabulary, strict=True) if not token])
    return tokenizer.to_str()


def tokenise(text: bytes, vocabulary: list[bytes]) -> list[int]:
    ids = {token: i for i, token in enumerate(vocabulary) if token}
    longest = max(len(token) for token in ids)
    found, start = [], 0
    while start < len(text):
        end = next(e for e in range(min(len(text), start + longest), start, -1) if text[start:e] in ids)
        found.append(ids[text[start:end]])
        start = end
    return found


class XGrammar:
    def __init__(self, vocabulary: list[bytes]) -> None:
        import xgrammar

        self.x = xgrammar
        info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[2])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.mask = xgrammar.allocate_token_bitmask(1, len(vocabulary))

    def compile(self, schema: dict[str, Any]) -> Any:
        return self.x.GrammarMatcher(self.compiler.compile_json_schema(json.dumps(schema)))

    def fill(self, matcher: Any) -> torch.Tensor:
        matcher.fill_next_token_bitmask(self.mask)
        return self.mask

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))


class LLGuidance:
    def __init__(self, vocabulary: list[bytes]) -> None:
        import llguidance

        self.x = llguidance

        self.tokenizer = llguidance.LLTokenizer(definition(vocabulary), eos_token=2)
        self.mask = torch.zeros(1, (len(vocabulary) + 31) // 32, dtype=torch.int32)

    def compile(self, schema: dict[str, Any]) -> Any:
        matcher = self.x.LLMatcher(self.tokenizer, self.x.LLMatcher.grammar_from_json_schema(schema))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def fill(self, matcher: Any) -> torch.Tensor:
        matcher.unsafe_compute_mask_ptr(self.mask.data_ptr(), self.mask.numel() * 4)
        return self.mask

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.consume_token(token))


def milliseconds(act: Callable[[], Any]) -> tuple[float, Any]:
    """CPU time of this thread, so that other work on the machine does not count."""
    start = time.thread_time()
    result = act()
    return (time.thread_time() - start) * 1e3, result


def allowed(mask: torch.Tensor) -> list[int]:
    bits = (mask[0][:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.flatten().nonzero().flatten().tolist()


def walk(library: Any, matcher: Any, ids: list[int] | None, rng: random.Random, vocabulary: list[bytes]) -> list[float]:
    """Milliseconds per token for the mask and for taking the token. ids None: draw up to 150 allowed tokens."""
    times = []
    for step in range(len(ids) if ids is not None else 150):
        fill_ms, mask = milliseconds(lambda: library.fill(matcher))
        if ids is not None:
            token = ids[step]
        else:
            choices = [i for i in allowed(mask) if i < len(vocabulary) and vocabulary[i]]
            if not choices:
                break
            token = rng.choice(choices)
        accept_ms, taken = milliseconds(lambda token=token: library.accept(matcher, token))
        assert taken, f"{vocabulary[token]!r} at {step}"
        times.append(fill_ms + accept_ms)
    return times


def main() -> None:
    torch.set_num_threads(1)
    record = []
    for vocabulary_name, vocabulary in (("shipped", shipped_vocabulary()), ("131072", made_up_vocabulary())):
        for kind in (LLGuidance, XGrammar):
            try:
                start_ms, library = milliseconds(lambda kind=kind, vocabulary=vocabulary: kind(vocabulary))
            except ImportError:
                continue
            for name, (schema, value) in SCHEMAS.items():
                text = json.dumps(value).encode()
                compiles, walks, draws = [], [], []
                for repeat in range(5):
                    compile_ms, matcher = milliseconds(lambda schema=schema, library=library: library.compile(schema))
                    compiles.append(compile_ms)
                    walks += walk(library, matcher, tokenise(text, vocabulary), random.Random(repeat), vocabulary)
                    draws += walk(library, library.compile(schema), None, random.Random(repeat), vocabulary)
                row = {
                    "vocabulary": vocabulary_name, "library": kind.__name__, "schema": name,
                    "tokenizer_ms": round(start_ms, 1), "compile_ms": round(sorted(compiles)[2], 2),
                    "first_compile_ms": round(compiles[0], 2),
                    **{f"{key}_us": [round(1e3 * sum(t) / len(t), 1), round(1e3 * max(t), 1)] for key, t in
                       (("walk", walks), ("draw", draws))},
                }  # fmt: skip
                record.append(row)
                sys.stdout.write(f"{row}\n")
    sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
