"""The modules that a model's checkpoint must hold, from its config alone: names, shapes, roles. Knows no file.

Names are canonical, with the public exports' root "backbone."; copies written by newer libraries use "model.".
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from hemiola.config.model import LayerKind, NemotronHConfig

ROOT = "backbone."
OTHER_ROOTS = ("model.",)
MTP_ROOT = "mtp."


def canonical(name: str) -> str:
    """The name with the canonical root, whichever root it came with; other names are returned as they are."""
    for root in OTHER_ROOTS:
        if name.startswith(root):
            return ROOT + name[len(root) :]
    return name


class Role(enum.Enum):
    """What a module is for, as reports group it."""

    ROUTED_EXPERTS = "routed experts"
    SHARED_EXPERTS = "shared experts"
    LATENT = "latent projections"
    ROUTER = "router"
    MAMBA = "mamba projections"
    ATTENTION = "attention"
    MLP = "dense mlp"
    SMALL = "norms, conv, A, D, dt"
    LM_HEAD = "lm_head"
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the checkpoint.

    name: of a linear, without ".weight"; of anything else the full tensor name.
    shape: logical, (out, in) for a linear. layer: index, None outside the layers.
    is_linear: read as a Weight. is_quantizable: may be stored in another scheme than PLAIN; a linear that is read row
    by row or that decides routing may not, nor may anything that is no linear.
    is_widened: kept in fp32 in memory whatever the file holds (A_log, D, dt_bias).
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None
    is_linear: bool = True
    is_quantizable: bool = True
    is_widened: bool = False

    @property
    def tensor_name(self) -> str:
        return f"{self.name}.weight" if self.is_linear else self.name


def _vector(name: str, shape: tuple[int, ...], layer: int | None, role: Role = Role.SMALL, **flags: bool) -> Module:
    return Module(name, shape, role, layer, is_linear=False, is_quantizable=False, **flags)


def expected_modules(config: NemotronHConfig) -> Iterator[Module]:
    """Every module of the model, in the order of a forward pass; the draft head (MTP) is not among them."""
    c, hidden = config, config.hidden_size
    yield Module(f"{ROOT}embeddings", (c.vocab_size, hidden), Role.EMBEDDING, is_quantizable=False)
    mlp_sizes = iter(c.mlp_intermediate_sizes)
    for layer, kind in enumerate(c.layers):
        prefix = f"{ROOT}layers.{layer}"
        mixer = f"{prefix}.mixer"
        yield _vector(f"{prefix}.norm.weight", (hidden,), layer)
        if kind is LayerKind.MAMBA:
            yield from _mamba(c, mixer, layer)
        elif kind is LayerKind.ATTENTION:
            query, key_value = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
            yield Module(f"{mixer}.q_proj", (query, hidden), Role.ATTENTION, layer)
            yield Module(f"{mixer}.k_proj", (key_value, hidden), Role.ATTENTION, layer)
            yield Module(f"{mixer}.v_proj", (key_value, hidden), Role.ATTENTION, layer)
            yield Module(f"{mixer}.o_proj", (hidden, query), Role.ATTENTION, layer)
        elif kind is LayerKind.MLP:
            yield from _up_down(mixer, hidden, next(mlp_sizes), Role.MLP, layer)
        else:
            yield from _moe(c, mixer, layer)
    yield _vector(f"{ROOT}norm_f.weight", (hidden,), None)
    if not c.tie_word_embeddings:
        yield Module("lm_head", (c.vocab_size, hidden), Role.LM_HEAD)


def _mamba(c: NemotronHConfig, mixer: str, layer: int) -> Iterator[Module]:
    yield Module(f"{mixer}.in_proj", (c.in_proj_size, c.hidden_size), Role.MAMBA, layer)
    yield _vector(f"{mixer}.conv1d.weight", (c.conv_dim, 1, c.conv_kernel), layer)
    if c.use_conv_bias:
        yield _vector(f"{mixer}.conv1d.bias", (c.conv_dim,), layer)
    for name in ("A_log", "D", "dt_bias"):
        yield _vector(f"{mixer}.{name}", (c.mamba_num_heads,), layer, is_widened=True)
    yield _vector(f"{mixer}.norm.weight", (c.mamba_inner,), layer)
    yield Module(f"{mixer}.out_proj", (c.hidden_size, c.mamba_inner), Role.MAMBA, layer)


def _moe(c: NemotronHConfig, mixer: str, layer: int) -> Iterator[Module]:
    yield Module(f"{mixer}.gate", (c.num_experts, c.hidden_size), Role.ROUTER, layer, is_quantizable=False)
    yield _vector(f"{mixer}.gate.e_score_correction_bias", (c.num_experts,), layer, Role.ROUTER)
    if c.latent_size is not None:
        yield Module(f"{mixer}.fc1_latent_proj", (c.latent_size, c.hidden_size), Role.LATENT, layer)
        yield Module(f"{mixer}.fc2_latent_proj", (c.hidden_size, c.latent_size), Role.LATENT, layer)
    for expert in range(c.num_experts):
        expert_name = f"{mixer}.experts.{expert}"
        yield from _up_down(expert_name, c.expert_input_size, c.moe_intermediate_size, Role.ROUTED_EXPERTS, layer)
    if c.num_shared_experts:
        shared = c.shared_intermediate_size
        yield from _up_down(f"{mixer}.shared_experts", c.hidden_size, shared, Role.SHARED_EXPERTS, layer)


def _up_down(prefix: str, width: int, intermediate: int, role: Role, layer: int) -> Iterator[Module]:
    yield Module(f"{prefix}.up_proj", (intermediate, width), role, layer)
    yield Module(f"{prefix}.down_proj", (width, intermediate), role, layer)
