"""A checkpoint folder's text files as one object: ids from text, text from ids, chat prompts, ids that end an answer.

Knows the files of a Hugging Face checkpoint, and nothing of requests or of how an answer is streamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from hemiola.errors import CheckpointError, ConfigError, RequestError
from hemiola.text.chat import ChatTemplate, Message

# Byte-level BPE writes printable bytes as themselves and the others as characters from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in _PRINTABLE)}


class Tokenizer:
    """Text to ids and back, for one checkpoint.

    is_byte_level: whether ids stand for bytes, so that the text of two runs of ids joined is the two texts joined
        wherever a character ends (all public Nemotron-H tokenizers).
    eos_token_ids: config.json's ids and generation_config.json's, in this order, each once.
    """

    def __init__(self, folder: Path, backend: tokenizers.Tokenizer) -> None:
        self._folder = folder
        self._backend = backend
        self.is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self.eos_token_ids = read_eos_token_ids(folder)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder; None when it has no tokenizer.json.

        Raises: CheckpointError when tokenizer.json is there and cannot be used.
        """
        file = Path(path) / "tokenizer.json"
        if not file.exists():
            return None
        try:
            backend = tokenizers.Tokenizer.from_buffer(file.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                "not a usable tokenizer",
                found=error,
                expected="a tokenizer.json of the tokenizers library",
                where=file,
                remedy="Fetch the file again, or remove it to work with token ids only.",
            ) from error
        return cls(Path(path), backend)

    @property
    def vocab_size(self) -> int:
        """Entries, added tokens included; the model's logits may be wider."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def definition(self) -> str:
        """What tokenizer.json says, as one text."""
        return self._backend.to_str()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. `add_special_tokens` applies tokenizer.json's own post-processor, which decides about BOS.

        A rendered chat prompt holds its special tokens already: encode it with `add_special_tokens=False`.
        Raises: RequestError when `text` is not a string of whole Unicode characters.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise RequestError(
                "text that cannot be encoded", found=ascii(text)[:80], expected="a string without lone surrogates"
            ) from error
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; incomplete characters come out as U+FFFD, ids without an entry as nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one id stands for, also where it is a part of a character; empty for ids without an entry."""
        entry = self._backend.id_to_token(token_id)
        if entry is None:
            return b""
        if not self.is_byte_level or token_id in self._added_ids:
            return self.decode([token_id], skip_special_tokens=False).encode()
        return bytes(_BYTES[character] for character in entry)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    def chat_template_source(self, *, with_tools: bool = False) -> str | None:
        """The text of the chat template, from which the form of answers can be told; None without one."""
        template = self._chat_template(with_tools)
        return template.source if template else None

    def chat_switches(self, *, with_tools: bool = False) -> frozenset[str]:
        """Names that the chat template reads beyond the standard ones; none without a template."""
        template = self._chat_template(with_tools)
        return template.switches if template else frozenset()

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **switches: object,
    ) -> str:
        """The prompt text of a conversation; see `ChatTemplate.render`.

        Raises: RequestError when the checkpoint has no template, or the template refuses; CheckpointError when the
        template itself is broken.
        """
        template = self._chat_template(bool(tools))
        if template is None:
            raise RequestError(
                "this model has no chat template",
                expected="chat_template.jinja or a chat_template in tokenizer_config.json",
                where=self._folder,
                remedy="Use plain text completion.",
            )
        return template.render(messages, tools, add_generation_prompt, switches)

    def _chat_template(self, with_tools: bool) -> ChatTemplate | None:
        template = self._chat_templates.get("tool_use") if with_tools else None
        return template or self._chat_templates.get("default")

    @cached_property
    def _chat_templates(self) -> dict[str, ChatTemplate]:
        """Templates by name, compiled on first use. chat_template.jinja is the default one where it exists."""
        config_file, jinja_file = self._folder / "tokenizer_config.json", self._folder / "chat_template.jinja"
        config = _read_json(config_file)
        tokens = _special_tokens(config)
        sources = _declared_templates(config, config_file)
        templates = {name: ChatTemplate(source, config_file, tokens) for name, source in sources.items()}
        if jinja_file.exists():
            try:
                source = jinja_file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise CheckpointError("not UTF-8 text", found=error, where=jinja_file) from error
            templates["default"] = ChatTemplate(source, jinja_file, tokens)
        return templates


def read_eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """The ids that end an answer: config.json's and generation_config.json's, each an int, a list or absent.

    Works without a tokenizer. Either file alone is not enough: Nemotron-3 ends its turns with an id that only
    generation_config.json names.
    Raises: ConfigError that names the file and the value.
    """
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        value = _read_json(Path(folder) / name).get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in found:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ConfigError(
                    "not a token id",
                    found=repr(token_id),
                    expected="an id, or a list of ids",
                    where=f"{Path(folder) / name}: eos_token_id",
                )
        ids += found
    return tuple(dict.fromkeys(ids))


def _declared_templates(config: Mapping[str, Any], where: Path) -> dict[str, str]:
    """The chat_template of tokenizer_config.json by name: one text is the default, a list names each of its own."""
    declared = config.get("chat_template")
    if declared is None:
        return {}
    entries = [{"name": "default", "template": declared}] if isinstance(declared, str) else declared
    sources: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                sources[name] = template
            case _:
                raise CheckpointError(
                    "not a chat template",
                    found=repr(entry)[:80],
                    expected="a text, or a list of objects with name and template",
                    where=f"{where}: chat_template",
                )
    return sources


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens of tokenizer_config.json (bos_token, eos_token, ...), which templates may print."""
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError("not valid JSON", found=error, where=file) from error
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object", found=type(value).__name__, where=file)
    return value
