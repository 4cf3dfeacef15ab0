"""Trains the tokenizer (byte-level BPE) on the corpus and encodes the corpus with it.

    python -m training.tokenizer --corpus build/corpus --out build/tokens

Writes ``tokenizer.json``, ``tokenizer_config.json``, ``tokens.bin`` (uint16, every document followed by the id of
``</s>``) and ``tokens.json`` (where each source begins and ends in it, its share, its held-out bytes). Ids 0 to 15 are
the special tokens of Nemotron-3; no BOS is ever added; digits are split one by one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.corpus import SEPARATOR
from training.heldout import END_ID

VOCAB_SIZE = 4096
SPECIAL_TOKENS = (
    "<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, 10)),
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
)  # fmt: skip
# A word takes the blank before it; digits stand alone; punctuation keeps together; blank lines are one piece.
_PIECES = r"'(?:[sdmt]|ll|ve|re)(?![a-zA-Z])| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s+(?!\S)|\s+"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of ``VOCAB_SIZE`` entries, learned from the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` as transformers and hemiola read them."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def encode_documents(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """uint16 ids of a corpus file: each document followed by ``END_ID``."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(text.split(SEPARATOR)):
        ids += [*encoding.ids, END_ID]
    return np.array(ids, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder written by training.corpus")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sources = json.loads((args.corpus / "sources.json").read_text("utf-8"))
    names = [source["name"] for source in sources]
    texts = {p: [(args.corpus / p / f"{n}.txt").read_text("utf-8") for n in names] for p in ("train", "heldout")}
    tokenizer = train_tokenizer(texts["train"])
    write_tokenizer(tokenizer, args.out)
    pieces, layout, at = [], [], 0
    for part in ("train", "heldout"):
        for source, text in zip(sources, texts[part], strict=True):
            ids = encode_documents(tokenizer, text)
            entry = {"part": part, "name": source["name"], "share": source["share"], "bytes": source[f"{part}_bytes"]}
            layout.append({**entry, "start": at, "end": at + len(ids)})
            pieces.append(ids)
            at += len(ids)
            print(f"{part:8} {source['name']:14} {len(ids):9} tokens", flush=True)
    np.concatenate(pieces).tofile(args.out / "tokens.bin")
    (args.out / "tokens.json").write_text(json.dumps(layout, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
