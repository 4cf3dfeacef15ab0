"""Router logits of a mixture-of-experts layer.

x: (T, hidden), activation dtype; weight: a plain Weight (E, hidden).
gate_dtype: dtype that the gate's weight is rounded to before the product. bfloat16 is what vLLM does on Hopper whatever
the file holds; float32 keeps the file's precision.
Returns (T, E) float32, unrounded.
Source: vLLM 0.25.0 fused_moe/router/gate_linear.py.
"""

from __future__ import annotations

import torch

from hemiola.formats.weight import Weight
from hemiola.ops.kept import KeptForms
from hemiola.ops.table import register


def router_logits(x: torch.Tensor, weight: Weight, gate_dtype: torch.dtype, *, kept: KeptForms) -> torch.Tensor:
    if weight.data.dtype == torch.float32 == gate_dtype:
        matrix = kept.data(weight)
    else:
        matrix = kept.get(weight, f"{gate_dtype}-f32", lambda: weight.data.to(gate_dtype).float())
    return torch.nn.functional.linear(x.float(), matrix)


register(op="router_logits", arm="reference", variant="torch", run=router_logits, keeps=True)
