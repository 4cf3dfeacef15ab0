"""The keys of config.json: one table says how each is spelled, read, defaulted, and by which layers it is needed.

Because keys are taken out of the file only through this table and the schedule's, every key ends as used, known and
inert, or named in a warning. Knows nothing of how values relate to each other: that is `model`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hemiola.config.reading import (
    ABSENT,
    Reading,
    block,
    flag,
    integer,
    interval,
    null_or,
    one_of,
    positive,
    shown,
    sizes,
    token_ids,
    wrong,
)
from hemiola.config.schedule import LayerKind
from hemiola.errors import ConfigError

REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Key:
    """One field of the config and how the file may spell it.

    Precedence: `legacy` spellings win over `name`, `also` spellings stand in when it is absent. `default` is for an
    absent key (vLLM's class default), REQUIRED refuses; `idle` is the value when no layer of `needed_by` exists (an
    empty `needed_by`: every model needs it). A `nullable` key counts as absent when it is null.
    """

    field: str
    name: str
    read: Callable[[object, str], Any]
    default: object
    needed_by: tuple[LayerKind, ...] = ()
    legacy: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    nullable: bool = False
    idle: object = 0

    @property
    def spellings(self) -> tuple[str, ...]:
        return (*self.legacy, self.name, *self.also)


_SIZE, _COUNT = integer(1), integer(0)
_DTYPES = one_of("bfloat16", "float32", "float16")
_ATTENTION, _MAMBA, _MLP, _MOE = (LayerKind.ATTENTION,), (LayerKind.MAMBA,), (LayerKind.MLP,), (LayerKind.MOE,)
_NO_LIMIT, _F32 = (0.0, math.inf), "float32"

KEYS = (
    Key("hidden_size", "hidden_size", _SIZE, 4096),
    Key("vocab_size", "vocab_size", _SIZE, 131072),
    Key("norm_eps", "layer_norm_epsilon", positive, 1e-5, also=("norm_eps", "rms_norm_eps")),
    Key("max_position_embeddings", "max_position_embeddings", _SIZE, 4096),
    Key("tie_word_embeddings", "tie_word_embeddings", flag, False),
    Key("dtype", "torch_dtype", _DTYPES, "bfloat16", also=("dtype",), nullable=True),
    Key("bos_token_id", "bos_token_id", null_or(_COUNT), 1),
    Key("eos_token_ids", "eos_token_id", token_ids, (2,)),
    Key("pad_token_id", "pad_token_id", null_or(_COUNT), 0),
    Key("quantization", "quantization_config", block, None, nullable=True),
    Key("num_attention_heads", "num_attention_heads", _SIZE, 32, _ATTENTION),
    Key("num_key_value_heads", "num_key_value_heads", null_or(_SIZE), 8, _ATTENTION),  # null: as many as query heads
    Key("head_dim", "head_dim", _SIZE, REQUIRED, _ATTENTION, also=("attention_head_dim",), nullable=True),
    Key("mamba_num_heads", "mamba_num_heads", _SIZE, 128, _MAMBA),
    Key("mamba_head_dim", "mamba_head_dim", _SIZE, 64, _MAMBA),
    Key("ssm_groups", "n_groups", _SIZE, 8, _MAMBA, legacy=("mamba_n_groups",), also=("mamba_num_groups",)),
    Key("ssm_state_size", "ssm_state_size", _SIZE, 128, _MAMBA, also=("mamba_state_dim",)),
    Key("conv_kernel", "conv_kernel", integer(2), 4, _MAMBA, legacy=("mamba_d_conv",)),
    Key("chunk_size", "chunk_size", _SIZE, 256, _MAMBA, legacy=("mamba_chunk_size",)),
    Key("use_conv_bias", "use_conv_bias", flag, True, _MAMBA, legacy=("mamba_conv_bias",), idle=False),
    Key("time_step_limit", "time_step_limit", interval, _NO_LIMIT, _MAMBA, ("mamba_dt_limit",), idle=_NO_LIMIT),
    Key("ssm_state_dtype", "mamba_ssm_cache_dtype", one_of(_F32), _F32, _MAMBA, nullable=True, idle=_F32),
    Key("mlp_intermediate_sizes", "intermediate_size", sizes, (21504,), _MLP, idle=()),
    Key("num_experts", "n_routed_experts", _SIZE, 8, _MOE, also=("num_local_experts",)),
    Key("num_experts_per_tok", "num_experts_per_tok", _SIZE, 2, _MOE),
    Key("moe_intermediate_size", "moe_intermediate_size", _SIZE, 7688, _MOE),
    Key("num_shared_experts", "n_shared_experts", _COUNT, 1, _MOE),
    Key("shared_intermediate_size", "moe_shared_expert_intermediate_size", _SIZE, 7688, _MOE),  # of one shared expert
    Key("latent_size", "moe_latent_size", _SIZE, None, _MOE, nullable=True, idle=None),
    Key("router_groups", "n_group", _SIZE, 1, _MOE),
    Key("topk_router_groups", "topk_group", _SIZE, 1, _MOE),
    Key("norm_topk_prob", "norm_topk_prob", flag, True, _MOE, idle=False),
    Key("routed_scaling_factor", "routed_scaling_factor", positive, 1.0, _MOE, idle=0.0),
)

# Keys whose value hemiola knows only one meaning of; any other is refused.
FIXED: Mapping[str, tuple[object, ...]] = {
    "model_type": ("nemotron_h",),
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "sliding_window": (None,),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), (False, None)),
}
ARCHITECTURE = "NemotronHForCausalLM"

INERT = frozenset(
    # No positional encoding; sizes never follow from `expand`; dt is never clamped by min, max or floor.
    "rope_theta rope_scaling rope_parameters partial_rotary_factor expand mamba_expand time_step_min time_step_max "
    "time_step_floor mamba_dt_min mamba_dt_max mamba_dt_init_floor mamba_ssm_dtype residual_in_fp32 "
    # Training, kernels of other implementations, and housekeeping of transformers.
    "rescale_prenorm_residual initializer_range moe_shared_expert_overlap num_logits_to_keep use_mamba_kernels "
    "attention_dropout hidden_dropout output_router_logits router_aux_loss_coef use_cache transformers_version "
    "auto_map _name_or_path _commit_hash _attn_implementation attn_implementation return_dict output_attentions "
    "output_hidden_states is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size "
    "chunk_size_feed_forward problem_type id2label label2id task_specific_params finetuning_task tokenizer_class "
    "prefix sep_token_id decoder_start_token_id tie_encoder_decoder torchscript pruned_heads use_bfloat16 "
    "tf_legacy_loss gradient_checkpointing".split()
)


def read_key(key: Key, reading: Reading, kinds: Collection[LayerKind]) -> Any:
    """The value of `key` in a model that has layers of `kinds`. Raises: ConfigError."""
    if key.needed_by and not any(kind in kinds for kind in key.needed_by):
        reading.inert += [spelling for spelling in key.spellings if spelling in reading.raw]
        return key.idle
    found = reading.take(key.field, key.spellings, key.nullable)
    if found is not ABSENT:
        return key.read(found, reading.where(key.field))
    reading.used[key.field] = key.name
    if key.default is REQUIRED:
        raise ConfigError(
            "missing, and it cannot be derived from other keys",
            expected="an explicit value under " + " or ".join(key.spellings),
            where=reading.where(key.field),
        )
    return key.default


def check_fixed(reading: Reading) -> None:
    """Refuse values that hemiola does not implement. Raises: ConfigError."""
    for name, accepted in FIXED.items():
        value = reading.raw.get(name, accepted[0])
        if not any(type(value) is type(other) and value == other for other in accepted):
            raise wrong(value, " or ".join(shown(other) for other in accepted), reading.at(name))
    architectures = reading.raw.get("architectures")
    if architectures is not None and (not isinstance(architectures, list) or ARCHITECTURE not in architectures):
        raise wrong(architectures, shown([ARCHITECTURE]), reading.at("architectures"))


def account_for_rest(reading: Reading) -> None:
    """Sort what nobody took into known-and-inert keys and warnings."""
    taken = {*reading.used.values(), *reading.inert, *reading.overruled, *FIXED, "architectures"}
    for name in reading.raw:
        if name in taken:
            continue
        if name in INERT:
            reading.inert.append(name)
        else:
            reading.warnings.append(f"{reading.at(name)}: unknown key, ignored (value {shown(reading.raw[name])})")
