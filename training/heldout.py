"""Held-out bits per byte of the training model.

The held-out documents form one stream, each behind an end-of-text token; it is cut into windows that do not overlap, so
a token sees at most ``length`` - 1 tokens before it. Every token counts, the end-of-text tokens too; the divisor is the
documents' UTF-8 bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.model import NemotronH

END_ID = 2  # </s>
_IGNORED = -100


def heldout_stream(tokens: Path) -> tuple[Tensor, int]:
    """(ids of the held-out stream, int64, END_ID first; UTF-8 bytes of its documents) from an encoded corpus."""
    layout = [e for e in json.loads((tokens / "tokens.json").read_text("utf-8")) if e["part"] == "heldout"]
    everything = np.fromfile(tokens / "tokens.bin", dtype=np.uint16).astype(np.int64)
    pieces = [everything[e["start"] : e["end"]] for e in layout]
    return torch.from_numpy(np.concatenate([[END_ID], *pieces])), sum(e["bytes"] for e in layout)


@torch.no_grad()
def bits_per_byte(model: NemotronH, ids: Tensor, nbytes: int, length: int, batch: int = 32, bf16: bool = True) -> float:
    """Bits per byte of the stream in windows of ``length`` predictions. ``bf16``: products in bf16, else float32."""
    was_training = model.training
    model.eval()
    device = model.lm_head.weight.device
    count = -(-(len(ids) - 1) // length)
    inputs = F.pad(ids[:-1], (0, count * length - len(ids) + 1), value=END_ID).view(count, length)
    targets = F.pad(ids[1:], (0, count * length - len(ids) + 1), value=_IGNORED).view(count, length)
    nats = 0.0
    for at in range(0, count, batch):
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits, _ = model(inputs[at : at + batch].to(device))
        wanted = targets[at : at + batch].flatten().to(device)
        nats += F.cross_entropy(logits.flatten(0, 1).float(), wanted, ignore_index=_IGNORED, reduction="sum").item()
    model.train(was_training)
    return nats / math.log(2) / nbytes
