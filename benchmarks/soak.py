"""Soak: mixed traffic with aborts on one engine for some minutes; memory, throughput and integrity as JSON.

    python -m benchmarks.soak [--model DIR] [--minutes 30] [--seed 0] [--dtype auto]

Traffic: new prompts, prompts that share beginnings, the same prompt again, answers that go on as a next turn, several
choices, random and greedy, log-probabilities, priorities; one in eight is aborted somewhere. The caches are small, so
that requests have to give way, and integrity is checked every second. Memory is the resident set of the process; its
slope is the least-squares line over the samples of the second half (the first builds what is built once). In bf16 that
includes compiled products, of which as many are kept as under the command line (see hemiola.config.threads); float32
has none and shows the engine's own memory alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import conditions
from hemiola import LLM, SamplingParams
from hemiola.config.threads import keep_fewer_products
from hemiola.front import Answer, Front


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def slope(points: list[tuple[float, float]]) -> float:
    """Of the least-squares line through (x, y) points; 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


class Traffic:
    def __init__(self, front: Front, longest: int, seed: int) -> None:
        self.front, self.longest, self.draw = front, longest, random.Random(seed)
        self.vocab_size = front.engine.vocab_size
        self.texts = [self._ids(longest // 2) for _ in range(6)]
        self.history: list[list[int]] = []
        self.open: list[Answer] = []
        self.counts = dict.fromkeys(("sent", "finished", "aborted", "errors"), 0)

    def _ids(self, count: int) -> list[int]:
        return [self.draw.randrange(3, self.vocab_size) for _ in range(count)]

    def send(self) -> None:
        draw, kind = self.draw, self.draw.random()
        if kind < 0.25 and self.history:
            prompt = draw.choice(self.history)[: self.longest * 3 // 4] + self._ids(draw.randrange(1, 30))
        elif kind < 0.7:
            prompt = draw.choice(self.texts)[: draw.randrange(1, self.longest // 2)] + self._ids(draw.randrange(0, 40))
        else:
            prompt = self._ids(draw.randrange(1, self.longest // 3))
        room = self.longest - len(prompt)
        params = SamplingParams(
            n=draw.choice([1, 1, 1, 1, 3]),
            max_tokens=max(1, min(room, draw.randrange(1, 60))),
            temperature=draw.choice([0.0, 0.0, 0.8]),
            logprobs=draw.choice([None, None, 2]),
            prompt_logprobs=draw.choice([None] * 9 + [1]),
            ignore_eos=draw.random() < 0.5,
        )
        self.open.append(self.front.add(prompt, params, priority=draw.choice([0, 0, 1])))
        self.counts["sent"] += 1

    def step(self) -> int:
        """Send, abort, step; the tokens that came out."""
        while len(self.open) < 10:
            self.send()
        if self.draw.random() < 0.02:
            victim = self.open.pop(self.draw.randrange(len(self.open)))
            self.front.abort(victim)
            self.counts["aborted"] += 1
        count = sum(len(delta.new_ids) for delta in self.front.step())
        for answer in [answer for answer in self.open if answer.finished]:
            self.open.remove(answer)
            self.counts["finished"] += 1
            self.counts["errors"] += any(choice.request.error is not None for choice in answer.choices)
            self.history.append(answer.prompt_ids + answer.choices[0].request.output_ids)
        del self.history[:-20]
        return count


def soak(model: str | None, minutes: float, seed: int, dtype: str = "auto", longest: int = 384) -> dict[str, Any]:
    plan = LLM(model, dtype=dtype, max_model_len=longest).loaded.engine.plan
    # Room for about three and a half requests of the longest kind on six slots.
    cache_bytes = max(12 * plan.slot_bytes, 6 * plan.slot_bytes + 7 * plan.blocks_for(longest) * plan.block_bytes // 2)
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=longest,
        max_num_seqs=6,
        max_num_batched_tokens=256,
        cache_bytes=cache_bytes,
        snapshot_bytes=20 * plan.slot_bytes,
        host_snapshot_bytes=10 * plan.slot_bytes,
    )
    engine = llm.loaded.engine
    traffic = Traffic(llm.front, longest, seed)
    start = last = time.monotonic()
    memory: list[tuple[float, float]] = []
    tokens_per_minute: list[int] = []
    mib_per_minute: list[float] = []
    tokens, minute, checks = 0, 1, 0
    while (now := time.monotonic()) - start < minutes * 60:
        tokens += traffic.step()
        if now - last > 1:
            engine.check_integrity()
            assert engine.healthy(), "no step was completed for too long"
            gc.collect()
            memory.append(((now - start) / 60, resident_bytes()))
            checks, last = checks + 1, now
        if now - start > minute * 60:
            tokens_per_minute.append(tokens)
            mib_per_minute.append(round(resident_bytes() / 2**20, 2))
            print(f"minute {minute}: {tokens} tokens, {mib_per_minute[-1]} MiB", file=sys.stderr, flush=True)
            tokens, minute = 0, minute + 1
    for answer in traffic.open:
        llm.front.abort(answer)
    engine.check_integrity()
    scheduler, stats = engine.scheduler, engine.stats().as_dict()
    del stats["preemptions"]["recent"]
    return {
        "benchmark": "soak",
        "conditions": conditions() | {"dtype": str(engine.model.dtype), "seed": seed},
        "minutes": minutes,
        "resident_mib_per_minute": mib_per_minute,
        "resident_slope_mib_per_minute": slope(memory[len(memory) // 2 :]) / 2**20,
        "output_tokens_per_minute": tokens_per_minute,
        "output_tokens_slope_per_minute": slope([(float(i), float(n)) for i, n in enumerate(tokens_per_minute)]),
        "integrity_checks": checks + 1,
        "all_free_at_the_end": [scheduler.blocks.num_free, scheduler.slots.num_free]
        == [scheduler.blocks.size, scheduler.slots.size],
        "requests": traffic.counts,
        "stats": stats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the shipped model where not given")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    keep_fewer_products()
    print(json.dumps(soak(arguments.model, arguments.minutes, arguments.seed, arguments.dtype), indent=1))


if __name__ == "__main__":
    main()
