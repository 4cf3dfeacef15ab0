"""How a request makes room: by swapping its KV and state to the host or by computing them again. Pure arithmetic.

    recompute_s = tokens to compute again / prefill_tokens_per_s
    swap_s      = 2 x bytes held / host_bytes_per_s          (out now, in later)

Tokens to compute again are those beyond a cached prefix that other requests hold: what nobody holds is about to go.
The cheaper one is taken; a tie is recomputed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

RECENT = 64


class PreemptionKind(enum.Enum):
    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Preemption:
    """One decision and its numbers. is_host_full: swapping was cheaper, and there was no host memory for it."""

    request_id: str
    kind: PreemptionKind
    recompute_tokens: int
    recompute_s: float
    swap_bytes: int
    swap_s: float
    is_host_full: bool


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """prefill_tokens_per_s: how fast tokens are computed again. host_bytes_per_s: to or from host memory."""

    prefill_tokens_per_s: float
    host_bytes_per_s: float

    def decide(self, request_id: str, recompute_tokens: int, swap_bytes: int, host_room: int) -> Preemption:
        """host_room: bytes of host memory that are left for swapping."""
        recompute_s = recompute_tokens / self.prefill_tokens_per_s
        swap_s = 2 * swap_bytes / self.host_bytes_per_s
        fits = swap_bytes <= host_room
        kind = PreemptionKind.SWAP if swap_s < recompute_s and fits else PreemptionKind.RECOMPUTE
        is_host_full = swap_s < recompute_s and not fits
        return Preemption(request_id, kind, recompute_tokens, recompute_s, swap_bytes, swap_s, is_host_full)


@dataclass(slots=True)
class PreemptionCounts:
    """Since the start; recent: the last decisions, oldest first."""

    recomputed: int = 0
    recomputed_tokens: int = 0
    swapped: int = 0
    swapped_bytes: int = 0
    recent: list[Preemption] = field(default_factory=list)

    def count(self, preemption: Preemption) -> None:
        if preemption.kind is PreemptionKind.SWAP:
            self.swapped += 1
            self.swapped_bytes += preemption.swap_bytes
        else:
            self.recomputed += 1
            self.recomputed_tokens += preemption.recompute_tokens
        self.recent.append(preemption)
        del self.recent[:-RECENT]
