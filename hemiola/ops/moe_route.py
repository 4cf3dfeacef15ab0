"""Router of a mixture-of-experts layer: which experts a token takes, and with what weight.

x: (T, hidden), activation dtype; gate: a plain Weight (E, hidden); correction_bias: (E,) float32, used for the
selection only. gate_dtype: dtype that the gate is rounded to before the product. bfloat16 is what vLLM does on Hopper
whatever the file holds; float32 keeps the file's precision.
top_k; router_groups, topk_router_groups: experts come from the best `topk_router_groups` of `router_groups` equal
groups, a group's score being the sum of its two largest biased scores; normalise: weights sum to one.
Returns (ids (T, top_k) int64 best first, weights (T, top_k) float32, logits (T, E) float32, unrounded). Weights are
unbiased sigmoid scores of the chosen experts. The routed scaling factor is not applied here (it multiplies the routed
output). Ties go to the lower expert id.
Source: vLLM 0.25.0 fused_moe/router/gate_linear.py, grouped_topk_router.py.
"""

from __future__ import annotations

import torch

from hemiola.formats.weight import Weight
from hemiola.ops.kept import KeptForms
from hemiola.ops.table import register


def moe_route(
    x: torch.Tensor,
    gate: Weight,
    gate_dtype: torch.dtype,
    correction_bias: torch.Tensor,
    top_k: int,
    router_groups: int,
    topk_router_groups: int,
    normalise: bool,
    *,
    kept: KeptForms,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = router_logits(x, gate, gate_dtype, kept=kept)
    return *choice(logits, correction_bias, top_k, router_groups, topk_router_groups, normalise), logits


def router_logits(x: torch.Tensor, gate: Weight, gate_dtype: torch.dtype, *, kept: KeptForms) -> torch.Tensor:
    if gate.data.dtype == torch.float32 == gate_dtype:
        matrix = kept.data(gate)
    else:
        matrix = kept.get(gate, f"{gate_dtype}-f32", lambda: gate.data.to(gate_dtype).float())
    return torch.nn.functional.linear(x.float(), matrix)


def choice(
    logits: torch.Tensor,
    correction_bias: torch.Tensor,
    top_k: int,
    router_groups: int,
    topk_router_groups: int,
    normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and weights."""
    scores = torch.sigmoid(logits)
    choice = scores + correction_bias
    if topk_router_groups < router_groups:
        grouped = choice.unflatten(-1, (router_groups, -1))
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        dropped = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, topk_router_groups:]
        choice = grouped.scatter(1, dropped[..., None].expand(-1, -1, grouped.shape[-1]), -torch.inf).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights


register(op="moe_route", arm="reference", variant="torch", run=moe_route, keeps=True)
