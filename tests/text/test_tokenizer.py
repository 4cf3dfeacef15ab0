"""Tokenizer: what a folder holds or lacks, ids both ways, the ids that end an answer, where templates come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.errors import CheckpointError, ConfigError, RequestError
from hemiola.text.tokenizer import Tokenizer, read_eos_token_ids
from tests.support.tiny_tokenizer import FIRST_BYTE_ID, KEPT_TOKENS, build_tokenizer

USER = [{"role": "user", "content": "Hi"}]


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def put(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_a_folder_without_tokenizer_is_no_error(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    assert Tokenizer.from_folder(str(tmp_path)) is None


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"\xff\xfe", b'{"model": {"type": "Nope"}}'])
def test_a_broken_tokenizer_names_its_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert caught.value.where == tmp_path / "tokenizer.json"


def test_a_tokenizer_that_is_a_folder_names_itself(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_text_survives_both_ways(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_ids_of_special_and_kept_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s>a<think>b</think></s>")
    assert ids[0] == 1
    assert [i for i in ids if i < FIRST_BYTE_ID] == [1, 12, 13, 2]
    assert tokenizer.decode(ids) == "a<think>b</think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a<think>b</think></s>"
    assert tokenizer.decode(tokenizer.encode("".join(KEPT_TOKENS))) == "".join(KEPT_TOKENS)


def test_nothing_is_added_to_plain_text_unless_the_tokenizer_says_so(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.encode("") == []
    folder = build_tokenizer(tmp_path / "with_bos")
    state = json.loads((folder / "tokenizer.json").read_text())
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    put(folder, tokenizer=state)
    assert load(folder).encode("a") == [1, *tokenizer.encode("a")]
    assert load(folder).encode("a", add_special_tokens=False) == tokenizer.encode("a")


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", None, 3])
def test_what_is_no_text_is_the_requests_error(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match="cannot be encoded"):
        tokenizer.encode(text)


def test_ids_without_an_entry_decode_to_nothing(tokenizer: Tokenizer) -> None:
    """The model's logits may be wider than the tokenizer."""
    a = tokenizer.encode("a")
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode([*a, 512, 2**31, *a]) == "aa"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, [2, 11], (2, 11)),
        ([2, 11], 2, (2, 11)),
        (2, None, (2,)),
        (None, [11], (11,)),
        (None, None, ()),
        (0, [3, 0, 3], (0, 3)),
    ],
)
def test_eos_ids_of_both_files(tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    put(tmp_path, config={"eos_token_id": config}, generation_config={"eos_token_id": generation})
    assert read_eos_token_ids(tmp_path) == expected


def test_eos_ids_without_files_and_with_infinity(tmp_path: Path) -> None:
    assert read_eos_token_ids(tmp_path) == ()
    put(tmp_path, config='{"time_step_limit": [0.0, Infinity], "eos_token_id": 2}')
    assert read_eos_token_ids(str(tmp_path)) == (2,)


@pytest.mark.parametrize("value", [-1, "2", 2.0, True, [2, None], [[2]], {"id": 2}])
def test_malformed_eos_ids_name_their_file(tmp_path: Path, value: Any) -> None:
    put(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
        read_eos_token_ids(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_malformed_file_is_named(tmp_path: Path, content: str) -> None:
    put(tmp_path, generation_config=content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_eos_token_ids(tmp_path)


def test_the_tokenizer_knows_its_ends(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (2, 11)


def test_no_chat_template_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        load(build_tokenizer(tmp_path)).apply_chat_template(USER)


def test_the_template_file_wins_over_the_declared_one(tmp_path: Path) -> None:
    folder = build_tokenizer(tmp_path)
    put(folder, tokenizer_config={"chat_template": "declared {{ eos_token }}", "eos_token": {"content": "<e>"}})
    assert load(folder).apply_chat_template(USER) == "declared <e>"
    (folder / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert load(folder).apply_chat_template(USER) == "file <e>"


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    folder = put(build_tokenizer(tmp_path), tokenizer_config={"chat_template": named})
    assert load(folder).apply_chat_template(USER) == "plain"
    assert load(folder).apply_chat_template(USER, [{"type": "function"}]) == "1 tools"


@pytest.mark.parametrize("declared", [3, {"default": "x"}, [{"name": "default"}], ["x"]])
def test_malformed_template_declarations_are_named(tmp_path: Path, declared: Any) -> None:
    folder = put(build_tokenizer(tmp_path), tokenizer_config={"chat_template": declared})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        load(folder).apply_chat_template(USER)


def test_a_broken_template_leaves_plain_text_usable(tmp_path: Path) -> None:
    folder = build_tokenizer(tmp_path, chat_template="{% if %}")
    tokenizer = load(folder)
    assert tokenizer.encode("a")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        tokenizer.apply_chat_template(USER)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="UTF-8"):
        load(folder).apply_chat_template(USER)


def test_token_bytes_are_those_of_the_text(text_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(text_folder)
    assert tokenizer is not None
    text = "é 한 \n<think>bada🎵"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(11) == b"<|im_end|>"
    assert tokenizer.token_bytes(575) == b""  # a row of logits without an entry


def test_switches_of_the_chat_template(text_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(text_folder)
    assert tokenizer is not None
    assert "enable_thinking" in (tokenizer.chat_template_source() or "")
    assert tokenizer.chat_switches() == {"enable_thinking", "truncate_history_thinking"}
