"""What transformers computes, by the sites of hemiola's ops: outputs of its modules, and the states in its cache.

What has no module of its own there (the convolution's output, the routing weights, the sampler) has no record. Where
hemiola's op gives the e4m3 codes that a W8A8 linear reads, the record is these codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from hemiola.evidence.oracle import Oracle, best, e4m3_codes
from hemiola.evidence.recorder import EMBEDDING, LAYER, Record, Site

_READERS = {"linear_attention": "in_proj", "full_attention": "q_proj", "mlp": "up_proj", "moe": "gate"}  # of the norm
_LINEARS = {  # an up_proj has an op together with its activation
    *("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "fc1_latent_proj", "fc2_latent_proj")
}


class OracleRecorder:
    """Runs requests on an oracle, the prompt in one piece, and keeps the values of every step."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self._kinds = [layer.block_type for layer in oracle.model.model.layers]
        self._records: list[Record] = []
        self._step, self._cache = 0, oracle.new_cache()

    def run(
        self, prompt_ids: Sequence[int], num_tokens: int, forced: Sequence[int] | None = None
    ) -> tuple[list[int], list[int], list[Record]]:
        """Output ids, the best token of every position, and the records. forced: output ids to go on with."""
        self._records, self._cache = [], self.oracle.new_cache()
        output_ids: list[int] = []
        found: list[int] = []
        ids = list(prompt_ids)
        with ExitStack() as hooks:
            for name, module in self.oracle.model.named_modules():
                path = name.split(".")
                hooks.enter_context(
                    module.register_forward_pre_hook(lambda _, args, path=path: self._given(path, args))
                )
                hooks.enter_context(
                    module.register_forward_hook(lambda own, _, output, path=path: self._gave(path, own, output))
                )
            for self._step in range(num_tokens):
                found.append(best(self.oracle.step(ids, self._cache), 1)[0][0][0])
                ids = [found[-1] if forced is None else forced[self._step]]
                output_ids += ids
        return output_ids, found, self._records

    def _given(self, path: Sequence[str], args: tuple[Any, ...]) -> None:
        """A module is about to run: what comes from an op without a module."""
        match path:
            case ["model", "layers", index, "mixer", "norm"]:
                layer = int(index)
                conv_state = self._cache.get_conv_state(layer)[..., 1 - self.oracle.config.conv_kernel :]
                ssm_state = self._cache.get_recurrent_state(layer)
                if self._step:
                    self._add(layer, "mamba2_update", "mamba2_update", conv_state, "conv_state")
                    self._add(layer, "mamba2_update", "mamba2_update", ssm_state, "ssm_state")
                else:
                    self._add(layer, "causal_conv1d", "causal_conv1d", conv_state, "conv_state")
                    self._add(layer, "ssd_scan", "ssd_scan", args[0].view(-1, *ssm_state.shape[1:3]))
                    self._add(layer, "ssd_scan", "ssd_scan", ssm_state, "ssm_state")
            case ["model", "layers", index, "mixer", "o_proj"]:
                op = "paged_attention_decode" if self._step else "paged_attention_prefill"
                self._add(int(index), op, op, self._by_heads(args[0]))

    def _gave(self, path: Sequence[str], module: Any, output: Any) -> None:
        """A module has run."""
        last, config = len(self._kinds), self.oracle.config
        match path:
            case ["model", "embeddings"]:
                self._add(EMBEDDING, "backbone.embeddings", "embedding", _rows(output))
            case ["model", "layers", index, "norm"]:
                reader = f"backbone.layers.{index}.mixer.{_READERS[self._kinds[int(index)]]}"
                self._add(int(index), "rms_norm", "rms_norm", self._as_read(reader, output))
            case ["model", "layers", index]:
                self._add(int(index), "output", LAYER, _rows(output))
            case ["model", "layers", index, "mixer", *inside]:
                self._mixed(int(index), inside, module, output)
            case ["model", "norm_f"]:
                self._add(last, "rms_norm", "rms_norm", _rows(output))
            case ["lm_head"]:
                self._add(
                    last, "backbone.embeddings" if config.tie_word_embeddings else "lm_head", "linear", _rows(output)
                )

    def _mixed(self, layer: int, inside: Sequence[str], module: Any, output: Any) -> None:
        """A module inside a mixer, or the mixer itself, has run."""
        mixer = f"backbone.layers.{layer}.mixer"
        routed = [] if self.oracle.config.latent_size is None else ["experts"]  # the shared expert is added before fc2
        match inside:
            case ["norm"]:
                op = "mamba2_update" if self._step else "gated_rms_norm"
                self._add(layer, op, op, self._as_read(f"{mixer}.out_proj", output))
            case ["gate"]:
                logits, _, ids = output
                self._add(layer, f"{mixer}.gate", "moe_route", ids)
                self._add(layer, f"{mixer}.gate", "moe_route", logits, "output[2]")
            case [*outer, "act_fn"] if outer in ([], ["shared_experts"]):
                mlp = ".".join([mixer, *outer])
                self._add(layer, f"{mlp}.up_proj", "linear", self._as_read(f"{mlp}.down_proj", output))
            case [*_, name] if name in _LINEARS and not isinstance(module, torch.nn.Identity):
                self._add(layer, ".".join([mixer, *inside]), "linear", _rows(output))
                if name in ("k_proj", "v_proj"):
                    self._add(layer, "kv_write", "kv_write", self._by_heads(output), f"{name[0]}_cache")
            case _ if inside == routed and self._kinds[layer] == "moe":
                self._add(layer, "moe_experts", "moe_experts", _rows(output))

    def _as_read(self, linear: str, x: Tensor) -> Tensor:
        """x, or its codes where the linear reads codes."""
        scale = self.oracle.input_scales.get(linear)
        return _rows(x) if scale is None else e4m3_codes(_rows(x), scale)

    def _by_heads(self, x: Tensor) -> Tensor:
        rows = _rows(x)
        return rows.view(len(rows), -1, self.oracle.config.head_dim)

    def _add(self, layer: int, label: str, op: str, value: Tensor, part: str = "output") -> None:
        copy = value.detach().to("cpu", copy=True).contiguous()
        self._records.append(Record(Site(self._step, layer, label, part), op, copy))


def _rows(x: Tensor) -> Tensor:
    """(1, T, ...) or (T, ...) -> (T, ...)."""
    return x.flatten(0, -2)
