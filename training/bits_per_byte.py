"""Held-out bits per byte of checkpoints as hemiola runs them, over the stream and windows of `heldout.py`.

python -m training.bits_per_byte --tokens build/tokens build/model hemiola/shipped
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from hemiola import LLM, SamplingParams
from training.heldout import heldout_stream

LENGTH = 1024  # predictions per window


def measure(model: Path, tokens: Path, dtype: str) -> dict[str, object]:
    """Every token of the stream is predicted once, with the tokens of its own window before it."""
    ids, num_bytes = heldout_stream(tokens)
    stream = ids.tolist()
    windows = [stream[low : low + LENGTH + 1] for low in range(0, len(stream) - 1, LENGTH)]
    llm = LLM(model, dtype=dtype, max_num_batched_tokens=4 * LENGTH)
    start = time.perf_counter()
    nats = 0.0
    outputs = llm.generate(windows, SamplingParams(max_tokens=1, prompt_logprobs=0))
    for output in outputs:
        nats -= sum(row[0][1] for row in output.prompt_logprobs[1:])
    return {
        "model": str(model),
        "dtype": dtype,
        "kv_cache": str(llm.loaded.engine.caches[llm.loaded.config.pattern.index("*")].k.dtype),
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "predictions": len(stream) - 1,
        "bytes": num_bytes,
        "window": LENGTH,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--tokens", type=Path, required=True, help="what training.tokenizer wrote")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "float32"])
    args = parser.parse_args()
    for model in args.models:
        print(json.dumps(measure(model, args.tokens, args.dtype)), flush=True)


if __name__ == "__main__":
    main()
