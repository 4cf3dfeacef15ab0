"""Where prompts come from: options, a file with one per line, a JSON file of token ids, or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hemiola.errors import RequestError

if TYPE_CHECKING:
    from hemiola.front import Prompt

_IDS = "a JSON list of prompts, each a list of token ids"


def read_prompts(prompts: Sequence[str], prompt_file: str | None, prompt_ids: str | None) -> list[Prompt]:
    """The prompts of a command line, from the one source that it names, or from standard input.

    Raises: RequestError when there is no source or more than one, or a file cannot be read or holds something else.
    """
    sources = {"--prompt": bool(prompts), "--prompt-file": prompt_file is not None, "--prompt-ids": bool(prompt_ids)}
    named = [name for name, is_given in sources.items() if is_given]
    if len(named) > 1:
        raise RequestError("prompts from more than one source", found=" and ".join(named), expected="one of them")
    if prompts:
        return list(prompts)
    if prompt_file is not None:
        return list(_lines(prompt_file))
    if prompt_ids is not None:
        return list(_id_lists(prompt_ids))
    return [_standard_input()]


def _standard_input() -> str:
    """All of standard input as one prompt, without the line end that `echo` and editors put last."""
    if sys.stdin is None or sys.stdin.isatty():
        raise RequestError("no prompt", expected="--prompt, --prompt-file, --prompt-ids, or text on standard input")
    text = _decode(sys.stdin.buffer.read(), "standard input")
    return text.removesuffix("\n").removesuffix("\r")


def _lines(file: str) -> list[str]:
    lines = [line.removesuffix("\r") for line in _decode(_read(file), file).split("\n")]
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise RequestError("no prompts in it", expected="one prompt per line", where=file)
    for number, line in enumerate(lines, start=1):
        if not line:
            raise RequestError("an empty line", expected="one prompt per line", where=f"{file}, line {number}")
    return lines


def _id_lists(file: str) -> list[list[int]]:
    text = _decode(_read(file), file)
    try:
        prompts = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{file}, line {error.lineno}, column {error.colno}"
        raise RequestError("not valid JSON", found=error.msg, expected=_IDS, where=where) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise RequestError("not usable JSON", found=error, expected=_IDS, where=file) from error
    if not isinstance(prompts, list) or not prompts:
        raise RequestError("not a list of prompts", found=_shown(prompts), expected=_IDS, where=file)
    for index, ids in enumerate(prompts):
        where = f"{file}, prompt {index}"
        if not isinstance(ids, list) or not ids:
            raise RequestError("not a list of token ids", found=_shown(ids), expected=_IDS, where=where)
        for position, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int):
                at = f"{where}, position {position}"
                raise RequestError("not a token id", found=_shown(token), expected="a whole number", where=at)
    return prompts


def _read(file: str) -> bytes:
    try:
        with open(file, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise RequestError("cannot be read", found=error.strerror or error, where=file) from error


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise RequestError("not UTF-8 text", found=found, where=where) from error


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
