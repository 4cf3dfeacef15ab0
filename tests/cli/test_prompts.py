from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from hemiola.cli.prompts import read_prompts
from hemiola.errors import RequestError


def standard_input(monkeypatch: pytest.MonkeyPatch, data: bytes, is_terminal: bool = False) -> None:
    stream = io.TextIOWrapper(io.BytesIO(data))
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stdin", stream)


def test_options_are_prompts_in_order() -> None:
    assert read_prompts(["b", "a"], None, None) == ["b", "a"]


@pytest.mark.parametrize(
    ("data", "prompt"),
    [(b"one\ntwo\n", "one\ntwo"), (b"one\r\n", "one"), (b"  one", "  one"), ("é\n\n".encode(), "é\n"), (b"", "")],
)
def test_standard_input_is_one_prompt(monkeypatch: pytest.MonkeyPatch, data: bytes, prompt: str) -> None:
    standard_input(monkeypatch, data)
    assert read_prompts([], None, None) == [prompt]


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    standard_input(monkeypatch, b"never read", is_terminal=True)
    with pytest.raises(RequestError, match=r"no prompt; expected --prompt, --prompt-file, --prompt-ids, or text"):
        read_prompts([], None, None)


def test_a_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("one\r\n  two\u2028still two \nthree".encode())
    assert read_prompts([], str(file), None) == ["one", "  two\u2028still two ", "three"]
    file.write_bytes(b"\xef\xbb\xbfone\n")
    assert read_prompts([], str(file), None) == ["one"]


def test_ids_come_from_json(tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text("[[1, 2], [3]]")
    assert read_prompts([], None, str(file)) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("p.txt", b"", "p.txt: no prompts in it; expected one prompt per line"),
        ("p.txt", b"a\n\nb\n", "p.txt, line 2: an empty line; expected one prompt per line"),
        ("p.txt", b"a\n\xff\n", "p.txt: not UTF-8 text; found byte 0xff at offset 2"),
        ("p.json", b"[[1, 2],\n [3,]]", "p.json, line 2, column"),
        ("p.json", b"{}", "p.json: not a list of prompts; found {}; expected a JSON list of prompts"),
        ("p.json", b"[]", "p.json: not a list of prompts; found []; expected"),
        ("p.json", b"[1, 2]", "p.json, prompt 0: not a list of token ids; found 1; expected"),
        ("p.json", b"[[1], []]", "p.json, prompt 1: not a list of token ids; found []; expected"),
        ("p.json", b'[[1], [2, "x"]]', 'p.json, prompt 1, position 1: not a token id; found "x"; expected'),
        ("p.json", b"[[1.0]]", "p.json, prompt 0, position 0: not a token id; found 1.0; expected"),
        ("p.json", b"[[true]]", "p.json, prompt 0, position 0: not a token id; found true; expected"),
        ("p.json", b"[" * 100_000, "p.json: not usable JSON"),
        ("p.json", b"[[" + b"9" * 5000 + b"]]", "p.json: not usable JSON"),
    ],
)
def test_malformed_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    with pytest.raises(RequestError, match="^" + re.escape(message)):
        read_prompts([], *((None, name) if name.endswith("json") else (name, None)))


def test_a_path_is_named_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=r"^\./missing: cannot be read; found No such file"):
        read_prompts([], "./missing", None)


def test_two_sources_are_refused() -> None:
    with pytest.raises(RequestError, match="found --prompt and --prompt-ids; expected one of them"):
        read_prompts(["a"], None, "ids.json")
