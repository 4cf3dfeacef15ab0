"""Bytes that a decode step moves at least: each weight it needs once, states read and written, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from hemiola.config.model import LayerKind, NemotronHConfig
from hemiola.formats.layout import Role
from hemiola.formats.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Traffic:
    """By class, for one step of `batch` rows with `context` tokens each. experts: the shared ones, too."""

    experts: int
    other_weights: int
    states: int
    kv: int

    @property
    def total(self) -> int:
        return self.experts + self.other_weights + self.states + self.kv

    def as_dict(self) -> dict[str, int]:
        return {
            "experts": self.experts,
            "other_weights": self.other_weights,
            "states": self.states,
            "kv": self.kv,
            "total": self.total,
        }


def distinct_experts(config: NemotronHConfig, batch: int) -> float:
    """Experts of a layer that `batch` tokens reach, expected, where each chooses its own evenly."""
    share = config.num_experts_per_tok / config.num_experts if config.num_experts else 0.0
    return config.num_experts * (1 - (1 - share) ** batch)


def decode_traffic(
    manifest: Manifest, config: NemotronHConfig, batch: int, context: int, state_bytes: int, kv_bytes: int
) -> Traffic:
    """state_bytes: of a request. kv_bytes: of a token, in all layers. Weights count as stored; experts as in
    `distinct_experts`; of the embedding a row each."""
    by_role: dict[Role, int] = {}
    for module in manifest.modules:
        by_role[module.role] = by_role.get(module.role, 0) + module.resident_bytes
    embedding = by_role.pop(Role.EMBEDDING, 0)
    experts, shared = (by_role.pop(role, 0) for role in (Role.ROUTED_EXPERTS, Role.SHARED_EXPERTS))
    other = sum(by_role.values()) + batch * embedding // config.vocab_size
    if config.tie_word_embeddings:
        other += embedding
    reached = experts * distinct_experts(config, batch) / config.num_experts if config.num_experts else 0.0
    has_kv = config.count(LayerKind.ATTENTION) > 0
    return Traffic(
        experts=int(reached) + shared,
        other_weights=other,
        states=2 * batch * state_bytes,
        kv=batch * (context + 1) * kv_bytes if has_kv else 0,
    )
