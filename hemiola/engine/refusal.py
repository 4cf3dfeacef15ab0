"""What can never run, whatever else finishes, is refused at once and with the arithmetic. Pure Python; no torch."""

from __future__ import annotations

from hemiola.cache.budget import CachePlan
from hemiola.engine.request import Request
from hemiola.errors import CapacityError, RequestError


def refuse_impossible(request: Request, plan: CachePlan, max_model_len: int) -> None:
    """Raises: RequestError for an empty prompt; CapacityError when the request is longer than the model allows or than
    all KV blocks together."""
    prompt, output = len(request.prompt_ids), request.params.max_tokens
    if not prompt:
        raise RequestError("the prompt is empty", expected="at least one token", where=request.request_id)
    arithmetic = f"{prompt} prompt + {output} output = {prompt + output} tokens"
    if prompt + output > max_model_len:
        raise CapacityError(
            "longer than the model allows",
            found=arithmetic,
            expected=f"at most max_model_len {max_model_len}",
            where=request.request_id,
            remedy="Shorten the prompt or lower max_tokens.",
        )
    needed = plan.blocks_for(prompt + output)
    if needed > plan.num_blocks:
        raise CapacityError(
            "can never fit the KV cache",
            found=f"{arithmetic} = {needed} blocks of {plan.block_size}",
            expected=f"at most {plan.num_blocks} blocks",
            where=request.request_id,
            remedy="Shorten the prompt, lower max_tokens, or raise cache_bytes.",
        )
