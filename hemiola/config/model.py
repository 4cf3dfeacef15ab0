"""NemotronHConfig: the one frozen description of a model, read from a checkpoint's config.json.

It owns the field names that the rest of hemiola uses and the sizes that follow from them; it knows neither tensors nor
quantisation schemes (the raw quantisation block is carried along for `formats`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hemiola.config.keys import KEYS, account_for_rest, check_fixed, read_key
from hemiola.config.reading import Reading, shown
from hemiola.config.schedule import LayerKind, read_layers, read_mtp
from hemiola.errors import ConfigError

__all__ = ["LayerKind", "NemotronHConfig"]


@dataclass(frozen=True, slots=True)
class NemotronHConfig:
    """One Nemotron-H model. Sizes count elements, not bytes.

    Sizes that only layers of an absent kind would need are 0 (`latent_size` None, `mlp_intermediate_sizes` empty),
    whatever the file says; the layers of the draft head count as present.
    """

    layers: tuple[LayerKind, ...]
    hidden_size: int
    vocab_size: int
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # "bfloat16" | "float32" | "float16"

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    mamba_num_heads: int
    mamba_head_dim: int
    ssm_groups: int
    ssm_state_size: int
    conv_kernel: int
    chunk_size: int
    use_conv_bias: bool
    time_step_limit: tuple[float, float]  # clamp of dt after softplus; (0, inf) clamps nothing
    ssm_state_dtype: str  # "float32"

    mlp_intermediate_sizes: tuple[int, ...]  # one per MLP layer, in layer order

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_shared_experts: int
    shared_intermediate_size: int  # of all shared experts together
    latent_size: int | None
    router_groups: int
    topk_router_groups: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    mtp_layers: tuple[LayerKind, ...]  # of one step
    num_mtp_steps: int

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    quantization: Mapping[str, Any] | None = field(default=None, hash=False)
    warnings: tuple[str, ...] = ()  # one sentence per key that is unknown or overruled by another spelling
    inert: tuple[str, ...] = ()  # keys found that are known and change nothing here

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def pattern(self) -> str:
        """The schedule as a string of letters, character i for layer i."""
        return "".join(kind.value for kind in self.layers)

    def count(self, kind: LayerKind) -> int:
        return self.layers.count(kind)

    def indices(self, kind: LayerKind) -> tuple[int, ...]:
        """Layer indices of this kind, ascending."""
        return tuple(index for index, layer in enumerate(self.layers) if layer is kind)

    @property
    def mamba_inner(self) -> int:
        """Width of x and z inside the mamba2 mixer: heads x head_dim, never `expand` x hidden."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: x, B and C together."""
        return self.mamba_inner + 2 * self.ssm_groups * self.ssm_state_size

    @property
    def in_proj_size(self) -> int:
        """Rows of in_proj, in the order [z, xBC, dt]."""
        return self.mamba_inner + self.conv_dim + self.mamba_num_heads

    @property
    def gated_norm_group(self) -> int:
        """Consecutive channels that share one variance in the gated norm; 0 without mamba layers."""
        return self.mamba_inner // self.ssm_groups if self.ssm_groups else 0

    @property
    def heads_per_ssm_group(self) -> int:
        """SSM heads that share one B and C; 0 without mamba layers."""
        return self.mamba_num_heads // self.ssm_groups if self.ssm_groups else 0

    @property
    def expert_input_size(self) -> int:
        """Width that routed experts read and write: the latent size where there is one."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def attention_scale(self) -> float:
        """Factor on q.k before the softmax; 0 without attention layers."""
        return self.head_dim**-0.5 if self.head_dim else 0.0

    @classmethod
    def from_dict(cls, raw: Mapping[str, object], where: str = "config.json") -> NemotronHConfig:
        """Read the parsed JSON of a config file; `where` names the file in errors. Raises: ConfigError."""
        reading = Reading(raw, where)
        check_fixed(reading)
        layers, suffix = read_layers(reading)
        mtp_layers, num_mtp_steps = read_mtp(reading, suffix)
        kinds = {*layers, *mtp_layers}
        values = {key.field: read_key(key, reading, kinds) for key in KEYS}
        if values["num_key_value_heads"] is None:
            values["num_key_value_heads"] = values["num_attention_heads"]
        values["mlp_intermediate_sizes"] = _spread_mlp_sizes(
            values["mlp_intermediate_sizes"], layers.count(LayerKind.MLP), reading
        )
        values["shared_intermediate_size"] *= values["num_shared_experts"]
        account_for_rest(reading)
        config = cls(
            layers=layers,
            mtp_layers=mtp_layers,
            num_mtp_steps=num_mtp_steps,
            warnings=tuple(reading.warnings),
            inert=tuple(reading.inert),
            **values,
        )
        _check_sizes(config, reading)
        return config

    @classmethod
    def from_folder(cls, path: str | Path) -> NemotronHConfig:
        """Read `config.json` in the folder `path`. Raises: ConfigError (also when it is absent or not JSON)."""
        return cls.from_file(Path(path) / "config.json")

    @classmethod
    def from_file(cls, file: Path) -> NemotronHConfig:
        """Read a config.json by itself. Raises: ConfigError (also when it is absent or not JSON)."""
        repeated: list[str] = []

        def build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
            result: dict[str, object] = {}
            for name, value in pairs:
                if name in result:  # a public checkpoint repeats n_groups; JSON readers keep the last
                    repeated.append(
                        f"{file}: {name}: given twice, {shown(result[name])} is overruled by {shown(value)}"
                    )
                result[name] = value
            return result

        try:
            raw = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=build_object)
        except FileNotFoundError:
            raise ConfigError("no such file", expected="a model folder with a config.json", where=file) from None
        except OSError as error:
            raise ConfigError("cannot be read", found=error.strerror, where=file) from error
        except ValueError as error:  # not UTF-8, or not JSON
            raise ConfigError("not valid JSON", found=error, where=file) from error
        if not isinstance(raw, dict):
            raise ConfigError("not a JSON object", found=shown(raw), expected="an object of keys", where=file)
        config = cls.from_dict(raw, str(file))
        return replace(config, warnings=(*repeated, *config.warnings))


def _spread_mlp_sizes(sizes: tuple[int, ...], num_mlp: int, reading: Reading) -> tuple[int, ...]:
    """One size per MLP layer: a single size is every layer's, a list goes by the layer's ordinal among its kind."""
    if len(sizes) == 1:
        return sizes * num_mlp
    if len(sizes) != num_mlp:
        raise ConfigError(
            "contradicts the layer schedule",
            found=f"{len(sizes)} sizes for {num_mlp} MLP layers",
            expected="one size, or one per MLP layer",
            where=reading.where("mlp_intermediate_sizes"),
        )
    return sizes


def _check_sizes(config: NemotronHConfig, reading: Reading) -> None:
    """Refuse sizes that cannot go together. Raises: ConfigError naming the key and both numbers."""

    def require(holds: bool, field_name: str, found: str, expected: str) -> None:
        if not holds:
            raise ConfigError("sizes contradict", found=found, expected=expected, where=reading.where(field_name))

    c, chunk = config, config.chunk_size
    if c.num_attention_heads:
        require(
            c.num_attention_heads % c.num_key_value_heads == 0,
            "num_key_value_heads",
            f"{c.num_key_value_heads} key/value heads for {c.num_attention_heads} query heads",
            "a divisor of the number of query heads",
        )
    if c.mamba_num_heads:
        require(
            c.mamba_num_heads % c.ssm_groups == 0,
            "ssm_groups",
            f"{c.ssm_groups} groups for {c.mamba_num_heads} mamba heads",
            "a divisor of the number of mamba heads",
        )
        require(chunk & (chunk - 1) == 0, "chunk_size", str(chunk), "a power of two")
    if c.num_experts:
        groups, chosen = c.router_groups, c.topk_router_groups
        require(
            c.num_experts % groups == 0 and (groups == 1 or c.num_experts // groups >= 2),
            "router_groups",
            f"{groups} groups of {c.num_experts} experts",
            "equal groups of at least two experts",
        )
        require(chosen <= groups, "topk_router_groups", f"{chosen} of {groups} groups", f"at most {groups}")
        reachable = c.num_experts // groups * chosen
        require(
            c.num_experts_per_tok <= reachable,
            "num_experts_per_tok",
            f"{c.num_experts_per_tok} experts per token of {reachable} that its groups offer",
            f"at most {reachable}",
        )
