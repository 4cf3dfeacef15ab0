from __future__ import annotations

from pathlib import Path

import pytest

from hemiola.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import build_tokenizer

TEMPLATE_FILE = Path(__file__).parent.parent / "data" / "chatml_template.jinja"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = TEMPLATE_FILE.read_text(encoding="utf-8")
    return build_tokenizer(tmp_path_factory.mktemp("text") / "tiny", chat_template=template)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    assert tokenizer is not None
    return tokenizer
