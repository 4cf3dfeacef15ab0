"""Thoughts: where a chat model's answer begins, which of its text is shown as reasoning, and how a thought is ended.

The rules are those of vLLM 0.25's nemotron_v3 parser; the state machine that applies them is in chat_output.
"""

from __future__ import annotations

from hemiola.text.tokenizer import Tokenizer

THINK, END_THINK = "<think>", "</think>"
# As the family's templates write it; a model was trained to answer right after it.
_END_OF_THOUGHT = f"\n{END_THINK}\n"


def thinking_is_open(prompt: str) -> bool:
    """Whether a rendered prompt ends inside of a thought, so that the answer begins there.

    Generation prompts end in "<think>\\n" (thinking on) or "<think></think>" (off), whatever the messages before say.
    """
    return prompt.rfind(THINK) > prompt.rfind(END_THINK)


def mark_ids(tokenizer: Tokenizer, mark: str) -> list[int]:
    """The ids of a mark: its own where it is a token, otherwise those that spell it."""
    return tokenizer.encode(mark, add_special_tokens=False)


def end_of_thought_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids to force when a thinking budget is used up."""
    return tokenizer.encode(_END_OF_THOUGHT, add_special_tokens=False)


class Thought:
    """The reasoning of one answer, without the white space around it; several thoughts stand on lines of their own."""

    def __init__(self) -> None:
        self._is_empty = True
        self._space = ""  # seen, and shown if more follows

    def push(self, text: str) -> str:
        """What can be shown now."""
        text = self._space + text
        shown = text.rstrip()
        if self._is_empty:
            shown = shown.lstrip()
        self._space = text[len(text.rstrip()) :] if shown or not self._is_empty else ""
        self._is_empty = self._is_empty and not shown
        return shown

    def pause(self) -> None:
        """The thought ends; another may follow."""
        self._space = "" if self._is_empty else "\n"
