"""Thoughts before structured answers, and thinking budgets; with marks that are tokens, and spelled ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from hemiola.config.sampling import SamplingParams, StructuredSpec
from hemiola.engine.constraint import LogitsConstraint
from hemiola.errors import RequestError
from hemiola.front import Front
from hemiola.structured import Grammars
from hemiola.structured.thinking import ThinkingConstraint, ThoughtMarks
from hemiola.text.chat_output import ChatFormat, ChatMessage, ChatParser
from hemiola.text.tokenizer import Tokenizer
from tests.structured.conftest import EOS, VOCAB, allowed, follow
from tests.support.scripted_model import ScriptedModel, scripted_front
from tests.support.tiny_tokenizer import byte_ids

OPEN, CLOSED = [10, 12], [10, 12, 13]  # prompts that end inside of a thought, and after one
NEWLINE = byte_ids(b"\n")
CHOICE = StructuredSpec(choice=["yes", "no"])


def constraint(grammars: Grammars, prompt: Sequence[int], **fields: Any) -> LogitsConstraint:
    found = grammars.constraint(SamplingParams(**fields), prompt)
    assert found is not None
    return found


def test_a_thought_is_free_but_for_its_end(grammars: Grammars) -> None:
    thinking = constraint(grammars, OPEN, structured=CHOICE)
    choices = allowed(thinking)
    assert choices is not None
    assert [token_id for token_id in range(VOCAB) if token_id not in choices] == list(EOS)
    assert follow(thinking, byte_ids(b"anything {] at all")) == 18
    thinking.accept(13)
    choices = allowed(thinking)
    assert choices is not None
    assert set(choices) >= {NEWLINE[0], *byte_ids(b"y"), *byte_ids(b"n")}
    assert not set(choices) & {*EOS, 12, 13, *byte_ids(b"a")}


@pytest.mark.parametrize("gap", [b"", b"\n"])
def test_the_answer_follows_after_one_newline_or_none(grammars: Grammars, gap: bytes) -> None:
    thinking = constraint(grammars, OPEN, structured=CHOICE)
    ids = [*byte_ids(b"so"), 13, *byte_ids(gap + b"yes")]
    assert follow(thinking, ids) == len(ids)
    assert thinking.is_finished
    assert thinking.num_accepted == len(ids)
    assert allowed(thinking) == list(EOS)


def test_a_second_newline_is_barred(grammars: Grammars) -> None:
    thinking = constraint(grammars, OPEN, structured=CHOICE)
    assert follow(thinking, [13, *NEWLINE, *NEWLINE]) == 2


@pytest.mark.parametrize("prompt", [CLOSED, [], [5, 6], [12, 13, 12, 13]])
def test_without_a_thought_the_grammar_begins_at_once(grammars: Grammars, prompt: list[int]) -> None:
    assert follow(constraint(grammars, prompt, structured=CHOICE), byte_ids(b"yes")) == 3
    assert follow(constraint(grammars, prompt, structured=CHOICE), NEWLINE) == 0
    assert grammars.constraint(SamplingParams(thinking_budget=0), prompt) is None


def test_nothing_is_constrained_where_nothing_is_asked(grammars: Grammars) -> None:
    assert grammars.constraint(SamplingParams(), OPEN) is None


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("structured", [None, CHOICE])
def test_a_budget_forces_the_end_of_the_thought(
    grammars: Grammars, budget: int, structured: StructuredSpec | None
) -> None:
    thinking = constraint(grammars, OPEN, thinking_budget=budget, structured=structured)
    assert follow(thinking, byte_ids(b"x" * budget)) == budget
    for forced in [*NEWLINE, 13, *NEWLINE]:
        assert allowed(thinking) == [forced]
        thinking.accept(forced)
    if structured is None:
        assert allowed(thinking) is None
    else:
        assert follow(thinking, byte_ids(b"yes")) == 3


def test_a_thought_that_ends_in_time_is_not_forced(grammars: Grammars) -> None:
    thinking = constraint(grammars, OPEN, thinking_budget=3)
    for token_id in [*byte_ids(b"xx"), 13, *byte_ids(b"and so on")]:
        assert allowed(thinking) is None
        thinking.accept(token_id)


def test_what_the_grammar_does_not_allow_is_an_error_when_it_is_said(grammars: Grammars) -> None:
    thinking = constraint(grammars, OPEN, structured=CHOICE)
    thinking.accept(13)
    with pytest.raises(RequestError, match="the structure cannot be followed further"):
        thinking.accept(byte_ids(b"x")[0])


# Marks that are spelled: one id per piece of text.

PIECES = [piece.encode() for piece in "</s> a </ think > </think> >{ </think>x k>y < / x>y".split()]
PIECES += [b">\n", b"\n"]


class AnswerIs:
    """Allows one id only."""

    is_finished, num_accepted = False, 0

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def accept(self, token_id: int) -> None:
        assert token_id == self.token_id

    def fill(self, mask: Any) -> bool:
        mask.zero_()
        mask[self.token_id // 32] = 1 << self.token_id % 32
        return True


def spelled(answer: LogitsConstraint | None = None, budget: int | None = None) -> ThinkingConstraint:
    marks = ThoughtMarks(
        mark=b"</think>",
        end_id=None,
        token_bytes=PIECES.__getitem__,
        num_tokens=len(PIECES),
        end_ids=(PIECES.index(b"\n"), PIECES.index(b"</think>"), PIECES.index(b"\n")),
        gap_ids=(PIECES.index(b"\n"),),
        eos_ids=(0,),
    )
    return ThinkingConstraint(marks, budget, answer)


def say(*pieces: bytes) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


@pytest.mark.parametrize(
    "thought",
    [[b"</think>"], [b"</", b"think", b">"], [b"a", b"<", b"/", b"think", b">\n"], [b"</", b"</", b"think", b">"]],
)
def test_b41_a_spelled_mark_ends_the_thought(thought: list[bytes]) -> None:
    thinking = spelled(AnswerIs(1))
    assert follow(thinking, say(*thought)) == len(thought)
    choices = allowed(thinking)
    assert choices == sorted(say(b"a", b"\n")), "the answer, or a newline before it"


def test_what_would_say_more_after_a_spelled_mark_is_barred() -> None:
    thinking = spelled(AnswerIs(1))

    def barred() -> list[bytes]:
        choices = allowed(thinking)
        assert choices is not None
        return [piece for i, piece in enumerate(PIECES) if i not in choices]

    assert barred() == [b"</s>", b"</think>x"]
    follow(thinking, say(b"</"))
    assert barred() == [b"</s>", b"</think>x"]
    follow(thinking, say(b"think"))
    assert barred() == [b"</s>", b">{", b"</think>x"], "in the order of their ids"
    follow(thinking, say(b"a"))
    assert barred() == [b"</s>", b"</think>x"]


def test_a_budget_with_a_spelled_mark() -> None:
    thinking = spelled(AnswerIs(1), budget=2)
    assert follow(thinking, say(b"a", b"</", b"\n", b"</think>", b"\n", b"a")) == 6
    assert follow(spelled(AnswerIs(1), budget=2), say(b"a", b"</", b"a")) == 2


# A whole run


class Stubborn(ScriptedModel):
    """Wants to say its script, one id per byte, and goes on at the same byte whatever was said instead."""

    def __init__(self, tokenizer: Tokenizer, *args: Any) -> None:
        super().__init__(*args)
        self._tokenizer = tokenizer

    def _next(self, consumed: list[int]) -> int:
        ((prompt, ids),) = self.scripts.items()
        said = sum(1 if i < 16 else len(self._tokenizer.token_bytes(i)) for i in consumed[len(prompt) :])
        return ids[min(said, len(ids) - 1)]


def stubborn_front(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, prompt: list[int], text: bytes) -> Front:
    """text: what the model wants to say, byte by byte, with | for the mark that ends a thought."""
    monkeypatch.setattr("tests.support.scripted_model.ScriptedModel", partial(Stubborn, tokenizer))
    ids = [13 if byte == ord("|") else byte_ids(bytes([byte]))[0] for byte in text]
    return scripted_front({tuple(prompt): [*ids, 2]}, tokenizer)


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "rows": {"type": "array", "items": {"type": "array"}}},
    "required": ["kind", "rows"],
    "additionalProperties": False,
}
ANSWER = b'{"kind": "b", "rows": [[1], []]}'


def run(front: Front, prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
    answer = front.add(prompt, params)
    while front.has_unfinished:
        front.step()
    (choice,) = answer.choices
    assert choice.request.error is None
    return choice.request.output_ids, str(choice.request.finish_reason)


@pytest.mark.parametrize("temperature", [0.0, 1e-3])
@pytest.mark.parametrize(
    ("prompt", "said", "reasoning"),
    [(OPEN, b"I think: {x}|\n" + ANSWER, "I think: {x}"), (OPEN, b"|" + ANSWER, ""), (CLOSED, ANSWER, "")],
)
def test_b41_a_schema_holds_after_the_thought_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Tokenizer,
    prompt: list[int],
    said: bytes,
    reasoning: str,
    temperature: float,
) -> None:
    params = SamplingParams(max_tokens=80, structured=StructuredSpec(json_schema=SCHEMA), temperature=temperature)
    ids, _ = run(stubborn_front(monkeypatch, tokenizer, prompt, said), prompt, params)
    parser = ChatParser(ChatFormat(True, "qwen3_coder"), thinking=prompt is OPEN, tokenizer=tokenizer)
    message = ChatMessage()
    message.add(parser.push(tokenizer.decode(ids), ids) + parser.finish())
    assert message.reasoning == reasoning
    assert json.loads(message.content) == json.loads(ANSWER)


def test_a_model_that_does_not_want_to_is_held_to_it(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    front = stubborn_front(monkeypatch, tokenizer, OPEN, b"well|no, I will not")
    params = SamplingParams(max_tokens=60, structured=StructuredSpec(choice=["yes", "never"]))
    ids, reason = run(front, OPEN, params)
    assert ids[:5] == [*byte_ids(b"well"), 13]
    assert tokenizer.decode(ids[5:-1]) == "never"
    assert ids[-1] == 2
    assert reason.endswith("STOP")


def test_a_budget_in_a_run_beside_others(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    front = stubborn_front(monkeypatch, tokenizer, OPEN, b"0123456789")
    budgets = [None, 0, 4]
    answers = [front.add(OPEN, SamplingParams(max_tokens=20, thinking_budget=budget)) for budget in budgets]
    while front.has_unfinished:
        front.step()
    free, none, some = (answer.choices[0].request.output_ids for answer in answers)
    end = [*NEWLINE, 13, *NEWLINE]
    assert free == [*byte_ids(b"0123456789"), 2]
    assert none == [*end, *byte_ids(b"3456789"), 2]
    assert some == [*byte_ids(b"0123"), *end, *byte_ids(b"789"), 2]
