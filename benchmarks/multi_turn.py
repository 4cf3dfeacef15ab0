"""Multi-turn chat: conversations that share a system prompt and send their whole history again with every turn.

    python -m benchmarks.multi_turn [--model DIR] [--conversations 10] [--turns 8] [--json]

Runs the trace with prefix reuse and without, on the shipped model by default, and prints the share of prompt tokens
reused per turn, the time to the first token of both runs, and the snapshot bytes held against their budget. All
conversations send their turn at once. Prompts are random ids: only lengths and what is shared matter to reuse.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.machine import conditions
from hemiola import LLM, SamplingParams
from hemiola.front import Front


@dataclass(frozen=True)
class Trace:
    """Sizes in tokens."""

    conversations: int = 10
    turns: int = 8
    system: int = 1000
    user: int = 40
    answer: int = 24


@dataclass(frozen=True)
class Turn:
    """One turn of all conversations. first_token_s: median time from sending to the first token."""

    prompt_tokens: int
    reused_tokens: int
    first_token_s: float

    @property
    def share(self) -> float:
        return self.reused_tokens / self.prompt_tokens


def converse(front: Front, trace: Trace, seed: int = 0) -> tuple[list[Turn], list[list[int]]]:
    """Run the trace; its turns, and each conversation's tokens at the end."""
    draw, vocab_size = random.Random(seed), front.engine.vocab_size
    histories = [_ids(draw, trace.system, vocab_size)] * trace.conversations
    params = SamplingParams(max_tokens=trace.answer, ignore_eos=True)
    turns = []
    for _ in range(trace.turns):
        histories = [history + _ids(draw, trace.user, vocab_size) for history in histories]
        start = time.perf_counter()
        answers = [front.add(history, params) for history in histories]
        first_token_s: dict[str, float] = {}
        while front.has_unfinished:
            for delta in front.step():
                if delta.new_ids:
                    first_token_s.setdefault(delta.answer.request_id, time.perf_counter() - start)
        requests = [answer.choices[0].request for answer in answers]
        turns.append(
            Turn(
                sum(len(request.prompt_ids) for request in requests),
                sum(request.num_cached_tokens or 0 for request in requests),
                statistics.median(first_token_s.values()),
            )
        )
        histories = [request.prompt_ids + request.output_ids for request in requests]
    return turns, histories


def _ids(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(vocab_size // 4, vocab_size // 2) for _ in range(count)]


def measure(model: str | None, trace: Trace, **settings: Any) -> dict[str, Any]:
    """Both runs and what they held."""
    longest = trace.system + trace.turns * (trace.user + trace.answer)
    runs: dict[str, Any] = {"benchmark": "multi_turn", "conditions": conditions(), "trace": asdict(trace)}
    for name, is_on in (("on", True), ("off", False)):
        llm = LLM(model, max_model_len=longest, prefix_caching=is_on, **settings)
        llm.generate([[5] * 40], SamplingParams(max_tokens=2))  # builds what is built once
        start = time.perf_counter()
        turns, _ = converse(llm.front, trace)
        engine = llm.loaded.engine
        engine.check_integrity()
        stats = engine.stats().as_dict()
        runs[name] = {
            "seconds": time.perf_counter() - start,
            "share_per_turn": [turn.share for turn in turns],
            "first_token_s_per_turn": [turn.first_token_s for turn in turns],
            "share_from_second_turn": sum(t.reused_tokens for t in turns[1:]) / sum(t.prompt_tokens for t in turns[1:]),
            "snapshot_bytes_held": stats["snapshot_bytes_held"],
            "snapshot_bytes_budget": stats["snapshot_bytes_budget"],
            "stats": stats,
        }
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the shipped model where not given")
    for name, default in asdict(Trace()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    arguments = vars(parser.parse_args())
    model, as_json = arguments.pop("model"), arguments.pop("json")
    result = measure(model, Trace(**arguments))
    if as_json:
        print(json.dumps(result, indent=1))
        return
    on, off = result["on"], result["off"]
    print("turn  reused   first token, reuse on   off")
    rows = zip(on["share_per_turn"], on["first_token_s_per_turn"], off["first_token_s_per_turn"], strict=True)
    for number, (share, with_reuse, without) in enumerate(rows, start=1):
        print(f"{number:4}  {share:6.1%}  {with_reuse * 1000:15.0f} ms {without * 1000:9.0f} ms")
    print(f"from the second turn on: {on['share_from_second_turn']:.1%} of prompt tokens reused")
    print(f"whole trace: {on['seconds']:.1f} s with reuse, {off['seconds']:.1f} s without")
    print(f"snapshots hold {on['snapshot_bytes_held']:,} of {on['snapshot_bytes_budget']:,} bytes")


if __name__ == "__main__":
    main()
