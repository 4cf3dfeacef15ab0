"""Routed experts: Lightning's layer with few and with many tokens, Super's latent experts, small and odd sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.experts import ExpertWeights, empty_codes, experts
from hemiola.kernels.nvfp4 import words_per_row

LIGHTNING = (128, 6, 2688, 1856)  # experts, top_k, in, inter
SUPER = (512, 22, 1024, 2688)
ODD = (6, 3, 80, 48)


def bank(scheme: str, num_experts: int, out_size: int, in_size: int) -> ExpertWeights:
    vector = torch.empty(num_experts, device="meta")
    if scheme == "nvfp4":
        row = words_per_row(in_size)
        codes, scales = (
            torch.empty(num_experts, out_size, n, dtype=torch.int32, device="meta") for n in (row, row // 8)
        )
        return ExpertWeights(codes, scales, vector, None)
    dtype = torch.float8_e4m3fn if scheme == "fp8" else torch.bfloat16
    codes = empty_codes(num_experts, out_size, in_size, dtype, "meta")
    return ExpertWeights(codes, None, *((vector, vector) if scheme == "fp8" else (None, None)))


def layer(
    scheme: str, num_tokens: int, geometry: tuple[int, int, int, int], invariant: bool = False, num_shared: int = 0
) -> object:
    num_experts, top_k, hidden, inter = geometry
    x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device="meta")
    weights = torch.empty(num_tokens, top_k, device="meta")
    num_experts += num_shared
    up, down = bank(scheme, num_experts, inter, hidden), bank(scheme, num_experts, hidden, inter)
    up, down = up._replace(num_shared=num_shared), down._replace(num_shared=num_shared)
    return experts(x, ids, weights, up, down, 2.5, None if num_shared else x, invariant=invariant)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for scheme in ("nvfp4", "fp8", "bf16"):
        for num_tokens in (1, 64, 1024, 8192):
            yield f"lightning-{scheme}-{num_tokens}", partial(layer, scheme, num_tokens, LIGHTNING)
            yield f"joined-{scheme}-{num_tokens}", partial(layer, scheme, num_tokens, LIGHTNING, num_shared=2)
        yield f"odd-{scheme}-1", partial(layer, scheme, 1, ODD)
        yield f"odd-{scheme}-invariant", partial(layer, scheme, 9, ODD, invariant=True)
    yield "super-nvfp4-64", partial(layer, "nvfp4", 64, SUPER)


def excludes(name: str, arch: int) -> str | None:
    return "FP8 products need compute capability 8.9" if "fp8" in name and arch < 89 else None
