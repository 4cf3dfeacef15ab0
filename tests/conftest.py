"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.seeded_checkpoint import write_seeded_checkpoint
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_tokenizer import build_tokenizer
from tests.support.variants import tiny

TEMPLATE_FILE = Path(__file__).parent / "data" / "chatml_template.jinja"

# Many small products: a second thread would only spin, and two test runs on one machine would stop each other.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def seeded_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the seeded checkpoint of a scheme, written once per session. Read only: copy it to damage it."""

    @cache
    def folder(scheme: str) -> Path:
        path = tmp_path_factory.mktemp("seeded") / scheme
        write_seeded_checkpoint(path, scheme)
        return path

    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model of a pattern, written once per session and kind. Read only: copy it to damage it.

    tiny_folder(pattern, scheme, overrides of the config, knobs of write_tiny_checkpoint)
    """
    written: dict[str, Path] = {}

    def folder(pattern: str, scheme: str = "f32", overrides: dict[str, Any] | None = None, **knobs: Any) -> Path:
        key = json.dumps([pattern, scheme, overrides, knobs])
        if key not in written:
            written[key] = tmp_path_factory.mktemp("tiny") / "model"
            write_tiny_checkpoint(written[key], tiny(pattern, **(overrides or {})), scheme, **knobs)
        return written[key]

    return folder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model M*- of 576 rows of logits with a tokenizer of 512 entries and a chat template. Read only."""
    folder = tmp_path_factory.mktemp("text") / "model"
    write_tiny_checkpoint(folder, tiny("M*-", vocab_size=576), "f32")
    return build_tokenizer(folder, chat_template=TEMPLATE_FILE.read_text(encoding="utf-8"))
