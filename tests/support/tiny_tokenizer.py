"""A small byte-level BPE tokenizer with the special ids of Nemotron-3, trained on the spot and saved as a folder."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = (
    ["<unk>", "<s>", "</s>"]
    + [f"<SPECIAL_{i}>" for i in range(3, 10)]
    + ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
)
# Added tokens that decoding keeps even when it skips special tokens.
KEPT_TOKENS = SPECIAL_TOKENS[12:]
FIRST_BYTE_ID = len(SPECIAL_TOKENS)
# Byte-level BPE writes printable bytes as themselves and the others as characters from 256 on; ids follow that order.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_ORDER = _PRINTABLE + [byte for byte in range(256) if byte not in _PRINTABLE]


def byte_ids(data: bytes) -> list[int]:
    """One id per byte, without any merge: the finest way to cut a text into ids."""
    return [FIRST_BYTE_ID + _BYTE_ORDER.index(byte) for byte in data]


def build_tokenizer(folder: Path, *, vocab_size: int = 512, chat_template: str | None = None) -> Path:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and, if given, chat_template.jinja.

    Ids: the special tokens above, then one id per byte (in the byte alphabet's order), then merges up to
    `vocab_size`. No BOS is added to text. Deterministic.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(4000)]
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the training text yields {tokenizer.get_vocab_size()} entries, not {vocab_size}")
    state = json.loads(tokenizer.to_str())
    for entry in state["added_tokens"]:
        entry["special"] = entry["content"] not in KEPT_TOKENS
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "tokenizer.json", state)
    eos_token = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    _write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": eos_token})
    _write_json(folder / "generation_config.json", {"eos_token_id": [2, 11]})
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return folder


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
