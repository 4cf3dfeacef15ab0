from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hemiola.config.sampling import SamplingParams, StructuredSpec
from hemiola.engine.constraint import LogitsConstraint, unpack
from hemiola.structured import Grammars
from hemiola.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import build_tokenizer

VOCAB = 520  # wider than the tokenizer's 512, as logits may be
EOS = (2, 11)
TEMPLATES = Path(__file__).parents[1] / "data"
V2_TEMPLATE = "{% if tools %}<AVAILABLE_TOOLS>{{ tools }}</AVAILABLE_TOOLS> <TOOLCALL>{% endif %}<think>\n"


def make(folder: Path, template: str) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(build_tokenizer(folder, chat_template=template))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("v3") / "tiny", (TEMPLATES / "chatml_template.jinja").read_text("utf-8"))


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB, EOS)


@pytest.fixture(scope="session")
def v2_grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(make(tmp_path_factory.mktemp("v2") / "tiny", V2_TEMPLATE), VOCAB, EOS)


def constraint_for(grammars: Grammars, prompt_ids: Sequence[int] = (), **structure: Any) -> LogitsConstraint:
    params = SamplingParams(structured=StructuredSpec(**structure))
    constraint = grammars.constraint(params, prompt_ids)
    assert constraint is not None
    return constraint


def allowed(constraint: LogitsConstraint) -> list[int] | None:
    """The ids that may come next, None for all."""
    mask = torch.full((-(-VOCAB // 32),), 0x5A5A5A5A, dtype=torch.int32)  # what it held before does not matter
    return unpack(mask[None], VOCAB)[0].nonzero().flatten().tolist() if constraint.fill(mask) else None


def follow(constraint: LogitsConstraint, ids: Sequence[int]) -> int:
    """How many of the ids are allowed, one after the other."""
    for count, token_id in enumerate(ids):
        choices = allowed(constraint)
        if choices is not None and token_id not in choices:
            return count
        constraint.accept(token_id)
    return len(ids)


def babble(constraint: LogitsConstraint, seed: int, limit: int = 400) -> list[int]:
    """Ids drawn at random from what is allowed, up to an end, which is taken half of the time that it is allowed."""
    rng, ids = random.Random(seed), []
    while len(ids) < limit:
        choices = allowed(constraint)
        assert choices, "something is always allowed"
        ends = [token_id for token_id in choices if token_id in EOS]
        if ends and (len(ends) == len(choices) or rng.random() < 0.5):
            return ids
        ids.append(rng.choice([token_id for token_id in choices if token_id not in EOS]))
        constraint.accept(ids[-1])
    return ids
