"""Router: Lightning's and Super's, few and many tokens, both types of the gate; grouped routing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.formats.weight import Scheme, Weight
from hemiola.kernels.router import NORM_TOKENS, moe_route, route, router_logits
from hemiola.ops.device import norm_route
from hemiola.ops.resident import ResidentWeights


def logits(num_tokens: int, num_experts: int, hidden: int, dtype: torch.dtype) -> object:
    x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device="meta")
    return router_logits(x, torch.empty(num_experts, hidden, dtype=dtype, device="meta"))


def choice(num_experts: int, top_k: int, groups: int, taken: int) -> object:
    scores, bias = torch.empty(8, num_experts, device="meta"), torch.empty(num_experts, device="meta")
    return moe_route(scores, bias, top_k, groups, taken, True)


def both(num_tokens: int, num_experts: int, hidden: int, top_k: int, groups: int = 1, taken: int = 1) -> object:
    x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device="meta")
    gate = torch.empty(num_experts, hidden, dtype=torch.bfloat16, device="meta")
    return route(x, gate, torch.empty(num_experts, device="meta"), top_k, groups, taken, True)


def with_norm(num_tokens: int, num_experts: int, hidden: int, top_k: int, has_residual: bool = True) -> object:
    """By the op's device variant."""
    x, weight, gate = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in ((num_tokens, hidden), (hidden,), (num_experts, hidden))
    )
    bias = torch.empty(num_experts, device="meta")
    router = (Weight("gate", (num_experts, hidden), Scheme.PLAIN, gate), gate.dtype, bias, top_k, 1, 1, True)
    norm = (x, x if has_residual else None, weight, 1e-5)
    assert norm_route.unsupported(*norm, *router) is None
    return norm_route.run(*norm, *router, resident=ResidentWeights(torch.device("meta")))


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for dtype in (torch.bfloat16, torch.float32):
        for num_tokens in (1, 64, 8192):
            yield f"lightning-{num_tokens}-{dtype}", partial(logits, num_tokens, 128, 2688, dtype)
    yield "super-64", partial(logits, 64, 512, 4096, torch.bfloat16)
    yield "choice-lightning", partial(choice, 128, 6, 1, 1)
    yield "choice-super", partial(choice, 512, 22, 1, 1)
    yield "choice-grouped", partial(choice, 24, 3, 3, 2)
    for num_tokens in (1, 200, 400):
        yield f"both-lightning-{num_tokens}", partial(both, num_tokens, 128, 2688, 6)
        yield f"both-super-{num_tokens}", partial(both, num_tokens, 512, 4096, 22)
    yield "both-ultra", partial(both, 200, 512, 8192, 22)
    yield "both-grouped", partial(both, 8, 24, 80, 3, 3, 2)
    for num_tokens in NORM_TOKENS:
        yield f"norm-lightning-{num_tokens}", partial(with_norm, num_tokens, 128, 2688, 6)
    yield "norm-first", partial(with_norm, 2, 128, 2688, 6, False)
    yield "norm-super", partial(with_norm, 1, 512, 4096, 22)


def excludes(name: str, arch: int) -> str | None:
    return "no clusters of blocks" if name.startswith("norm") and not 90 <= arch < 120 else None
