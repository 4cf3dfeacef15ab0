"""What of a model a simulation needs: the cache bytes of each layer, by configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from hemiola.cache.budget import CachePlan
from hemiola.cache.plan import plan_engine
from hemiola.config.engine import EngineConfig
from hemiola.config.model import LayerKind, NemotronHConfig
from hemiola.model.specs import KVSpec, StateSpec


@dataclass(frozen=True, slots=True)
class Geometry:
    """name: for reports. activation_bytes, kv_element_bytes: per number."""

    name: str
    config: NemotronHConfig
    activation_bytes: int
    kv_element_bytes: int

    @property
    def cache_specs(self) -> tuple[KVSpec | StateSpec | None, ...]:
        """What each layer needs kept between steps."""
        return tuple(_spec(self.config, index, kind) for index, kind in enumerate(self.config.layers))

    @property
    def chunk_size(self) -> int:
        return self.config.chunk_size or 1

    def max_model_len(self, config: EngineConfig) -> int:
        return config.max_model_len or self.config.max_position_embeddings

    def plan(self, config: EngineConfig) -> CachePlan:
        """The engine's plan, but for the clamp to the memory of this machine: another one is simulated.

        Raises: CapacityError when not even one request fits.
        """
        return plan_engine(
            config,
            self.cache_specs,
            max_model_len=self.max_model_len(config),
            activation_bytes=self.activation_bytes,
            kv_element_bytes=self.kv_element_bytes,
        )


def _spec(c: NemotronHConfig, index: int, kind: LayerKind) -> KVSpec | StateSpec | None:
    if kind is LayerKind.MAMBA:
        return StateSpec(index, c.conv_dim, c.conv_kernel - 1, c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size)
    if kind is LayerKind.ATTENTION:
        return KVSpec(index, c.num_key_value_heads, c.head_dim)
    return None
