"""Trains the small Nemotron-H on an encoded corpus and writes its BF16 checkpoint.

    python -m training.train --tokens build/tokens --out build/model --minutes 8

One GPU (a CPU works, slowly). AdamW, linear warm-up, cosine decay; matrix products in bf16, everything else float32.
The number of steps follows from the time budget and the step time measured first; --steps fixes it instead. In the last
part of the run the weights are used as the shipped formats will store them, so that quantisation costs little.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from training.export import write_checkpoint
from training.heldout import bits_per_byte, heldout_stream
from training.model import ModelConfig, NemotronH

_WARM_UP_STEPS, _TIMED_FROM, _TIMED_TO = 300, 20, 60
_ROUNDING_FROM, _ROUNDING_FULL = 0.7, 0.8  # shares of the run
_FINAL_RATE = 0.02  # share of the peak learning rate


def learning_rate(step: int, steps: int) -> float:
    """Share of the peak rate: linear warm-up, then half a cosine."""
    progress = min(1.0, max(0, step - _WARM_UP_STEPS) / max(1, steps - _WARM_UP_STEPS))
    cosine = _FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
    return min(1.0, (step + 1) / _WARM_UP_STEPS) * cosine


class Windows:
    """Draws training windows: a source by share times size, then a place in it; a pure function of the seed."""

    def __init__(self, folder: Path, length: int, seed: int, device: torch.device) -> None:
        layout = [e for e in json.loads((folder / "tokens.json").read_text("utf-8")) if e["part"] == "train"]
        self._starts = np.array([e["start"] for e in layout])
        self._room = np.array([e["end"] - e["start"] - length for e in layout])
        weights = np.array([e["share"] * (e["end"] - e["start"]) for e in layout])
        self._chances = weights / weights.sum()
        self._random = np.random.default_rng(seed)
        tokens = np.fromfile(folder / "tokens.bin", dtype=np.uint16)
        self._tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self._offsets = torch.arange(length + 1, device=device)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """(ids, next ids), both (count, length) int64."""
        source = self._random.choice(len(self._chances), size=count, p=self._chances)
        start = self._starts[source] + (self._random.random(count) * self._room[source]).astype(np.int64)
        at = torch.from_numpy(start).to(self._offsets.device, non_blocking=True)
        window = self._tokens[at.unsqueeze(1) + self._offsets].long()
        return window[:, :-1], window[:, 1:]


def build_optimizer(model: NemotronH, rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices of linear layers only."""
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and "conv1d" not in name and "embeddings" not in name
        (decayed if is_matrix else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


def _finished(device: torch.device) -> float:
    """The time, in s, at which the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="folder written by training.tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="time budget, compilation included")
    parser.add_argument("--steps", type=int, default=0, help="fixed number of steps instead of the budget")
    parser.add_argument("--batch", type=int, default=64, help="windows per step")
    parser.add_argument("--length", type=int, default=1024, help="tokens per window")
    parser.add_argument("--rate", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--balance-rate", type=float, default=1e-3, help="step of the router's selection bias")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    args = parser.parse_args()

    began = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    windows = Windows(args.tokens, args.length, args.seed, device)
    model = NemotronH(ModelConfig(dropout=args.dropout)).to(device)
    optimizer = build_optimizer(model, args.rate)
    ids, nbytes = heldout_stream(args.tokens)

    def loss_of(batch: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            logits, loads = model(batch)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), loads

    compiled = loss_of if args.eager else torch.compile(loss_of, dynamic=False)
    steps, step, evaluations = args.steps, 0, []
    losses: list[Tensor] = []
    bar = tqdm(disable=not sys.stderr.isatty(), unit="step")
    shown = saved = time.perf_counter()
    timed = 0.0
    loads = torch.zeros(())
    while not steps or step < steps:
        if step == _TIMED_FROM:
            timed = _finished(device)
        if step == _TIMED_TO and not steps:
            now = _finished(device)
            per_step = (now - timed) / (_TIMED_TO - _TIMED_FROM)
            steps = step + max(1, int((args.minutes * 60 - (now - began)) / per_step * 0.97))
            print(f"{per_step * 1e3:.1f} ms per step, {now - began:.0f} s so far: {steps} steps", flush=True)
            bar.total = steps
        progress = step / steps if steps else 0.0
        model.set_rounding(min(1.0, max(0.0, (progress - _ROUNDING_FROM) / (_ROUNDING_FULL - _ROUNDING_FROM))))
        for group in optimizer.param_groups:
            group["lr"] = args.rate * (learning_rate(step, steps) if steps else (step + 1) / _WARM_UP_STEPS)
        loss, loads = compiled(*windows.draw(args.batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.balance(loads, args.balance_rate * (1 - progress))
        losses.append(loss.detach())
        step += 1
        bar.update()
        now = time.perf_counter()
        last = step == steps
        if now - shown > 10 or last:
            mean, shown = torch.stack(losses).mean().item(), now
            busiest = (loads.max(-1).values / loads.mean(-1)).max().item()
            print(f"step {step} loss {mean:.4f} busiest expert {busiest:.2f}x {now - began:.0f} s", flush=True)
            if not math.isfinite(mean):
                sys.exit("the loss is not finite")
            losses.clear()
        if now - saved > 60 or last:
            bits = bits_per_byte(model, ids, nbytes, args.length)
            evaluations.append({"step": step, "loss": mean, "heldout_bits_per_byte": bits})
            print(f"step {step} held-out bits per byte {bits:.4f}", flush=True)
            write_checkpoint(model, args.tokens, args.out, 4 * args.length)
            saved = time.perf_counter()
    bar.close()

    seconds = time.perf_counter() - began
    results = {}
    for name, share in (("float", 0.0), ("rounded", 1.0)):
        model.set_rounding(share)
        results[f"heldout_bits_per_byte_{name}"] = bits_per_byte(model, ids, nbytes, args.length)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "steps": step,
        "tokens": step * args.batch * args.length,
        "seconds": round(seconds, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "geometry": asdict(model.config),
        "expert_loads_last_step": loads.tolist(),
        **results,
        "evaluations": evaluations,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(json.dumps({k: v for k, v in record.items() if k not in ("evaluations", "geometry", "settings")}), flush=True)


if __name__ == "__main__":
    main()
