"""transformers' own Nemotron-H, in this process: an oracle for goldens, and what it computes op by op.

It is another implementation of the model from the same files; nothing of hemiola's ops runs. Weights are read and,
where they are quantised, expanded by `hemiola.formats`; the inputs of W8A8 linears are rounded to their e4m3 grid.

Its one known defect is mended (`mend`): its prefill clamps dt from below at `time_step_min`, which is only meant for
drawing initial values, and ignores the configuration's `time_step_limit`; its one-token form has no clamp, so that it
disagrees with itself (huggingface/transformers pull request 48989). The package is not one that hemiola needs: without
it, or with one of another interface, an EvidenceError says what to install.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hemiola.config.engine import EngineConfig
from hemiola.config.model import LayerKind
from hemiola.engine.request import TokenLogprobs
from hemiola.evidence.golden import EvidenceError
from hemiola.formats.manifest import Manifest
from hemiola.formats.quant import fp8
from hemiola.formats.weight import Scheme
from hemiola.loading import activation_dtype, bind_ops, open_manifest

OLDEST = (5, 24)  # whose forward takes its cache as `cache`
NEEDED = "transformers==5.24.0"
MENDED = "dt limit in prefill mended (huggingface/transformers pull request 48989)"


class Oracle:
    """A checkpoint loaded into transformers' Nemotron-H.

    settings: fields of EngineConfig, of which dtype (also of the KV cache) and device count. engine: name, version and
    what was done to it.

    Raises: EvidenceError without a transformers that can be used, and for a checkpoint that it cannot run.
    """

    def __init__(
        self, model: str | Path | None, settings: Mapping[str, Any] | None = None, revision: str | None = None
    ) -> None:
        package = _package()
        config = EngineConfig(**{**(settings or {}), "arms": "reference"})
        folder, self.config, self.manifest = open_manifest(model, revision)
        if not self.config.count(LayerKind.ATTENTION):
            raise EvidenceError(
                "transformers cannot decode a model without attention layers: its cache then has no length",
                where=folder,
            )
        self.dtype = activation_dtype(config, self.config)
        self.device = bind_ops(config)[1]
        self.model, self.input_scales = _load(package, folder, self.manifest, self.dtype)
        self.model.to(self.device)
        mend(self.model)
        self._new_cache = partial(package.DynamicCache, config=self.model.config)
        is_plain = all(module.scheme is Scheme.PLAIN for module in self.manifest.modules)
        expanded = "" if is_plain else "; weights expanded, inputs of FP8 linears rounded to e4m3"
        self.engine = f"transformers {package.__version__}, {MENDED}{expanded}"

    @torch.inference_mode()
    def decode(self, prompt_ids: Sequence[int], num_tokens: int, top_k: int) -> tuple[list[int], list[TokenLogprobs]]:
        """Greedy tokens, the prompt in one piece and then token by token, and the best log-probabilities at each."""
        output_ids: list[int] = []
        rows: list[TokenLogprobs] = []
        cache, step = self.new_cache(), list(prompt_ids)
        for _ in range(num_tokens):
            rows += best(self.step(step, cache), top_k)
            step = [rows[-1][0][0]]
            output_ids += step
        return output_ids, rows

    @torch.inference_mode()
    def prefill(self, prompt_ids: Sequence[int], output_ids: Sequence[int], top_k: int) -> list[TokenLogprobs]:
        """The best log-probabilities at each output position, the whole sequence given at once."""
        ids = torch.tensor([[*prompt_ids, *output_ids]], device=self.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0]
        return best(logits[len(prompt_ids) - 1 : -1], top_k)

    def new_cache(self) -> Any:
        """An empty one, for `step`."""
        return self._new_cache()

    @torch.inference_mode()
    def step(self, ids: Sequence[int], cache: Any) -> Tensor:
        """One forward of ids after what the cache holds, which it then holds, too; the last row's logits (1, V)."""
        tokens = torch.tensor([ids], device=self.device)
        logits: Tensor = self.model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[0]
        return logits


def best(logits: Tensor, top_k: int) -> list[TokenLogprobs]:
    """(T, V) -> per row the best (id, log-probability), best first; the lowest id first among equals."""
    logprobs = logits.double().log_softmax(-1)
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    return [
        list(zip(row_ids, row_values, strict=True))
        for row_ids, row_values in zip(ids[:, :top_k].tolist(), values[:, :top_k].tolist(), strict=True)
    ]


def mend(model: Any) -> None:
    """Give the dt limits of the configuration to the prefill of every Mamba-2 mixer.

    Raises: EvidenceError for a model that keeps them elsewhere.
    """
    limit = tuple(float(bound) for bound in model.config.time_step_limit)
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            if not hasattr(layer.mixer, "time_step_limit"):
                raise EvidenceError(
                    "this transformers keeps its dt limits elsewhere",
                    found="a Mamba-2 mixer without time_step_limit",
                    where="transformers",
                    remedy=f"pip install '{NEEDED}'.",
                )
            layer.mixer.time_step_limit = limit


def _package() -> Any:
    """Raises: EvidenceError without transformers, and for one that is too old."""
    try:
        package = importlib.import_module("transformers")
    except ModuleNotFoundError as missing:
        raise EvidenceError(
            "transformers is not installed", found=missing, where="oracle", remedy=f"pip install '{NEEDED}'."
        ) from missing
    version = tuple(int(part) for part in package.__version__.split(".")[:2])
    if version < OLDEST:
        raise EvidenceError(
            "transformers is too old",
            found=package.__version__,
            expected=f"{'.'.join(map(str, OLDEST))} or later",
            where="oracle",
            remedy=f"pip install '{NEEDED}'.",
        )
    return package


def _load(package: Any, folder: Path, manifest: Manifest, dtype: torch.dtype) -> tuple[Any, dict[str, float]]:
    """The model, and by module the input scales that it rounds with.

    Raises: EvidenceError for experts whose inputs have scales, which transformers has no place for, and when a tensor
    of either side is left over.
    """
    own = package.NemotronHConfig.from_pretrained(folder)
    if hasattr(own, "quantization_config"):
        del own.quantization_config
    tensors: dict[str, Tensor] = {}
    input_scales: dict[str, float] = {}
    for module in manifest.modules:
        if not module.is_linear:
            tensors[module.name] = manifest.tensor(module.name)
            continue
        weight = manifest.weight(module.name)
        tensors[f"{module.name}.weight"] = weight.data if weight.scheme is Scheme.PLAIN else weight.dense()
        if weight.scheme is Scheme.FP8 and weight.input_scale is not None:
            if ".experts." in module.name:
                raise EvidenceError(
                    "transformers cannot run this checkpoint: it keeps a layer's experts in one tensor without scales",
                    found="FP8 W8A8",
                    expected="experts whose inputs are not quantised",
                    where=module.name,
                )
            input_scales[module.name] = weight.input_scale
    with _quiet(package.utils.logging):
        model, report = package.NemotronHForCausalLM.from_pretrained(
            None,
            config=own,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    if left := {kind: sorted(map(str, names)) for kind, names in report.items() if names}:
        raise EvidenceError("transformers does not take the checkpoint as it is", found=left, where="oracle")
    for name, scale in input_scales.items():
        model.get_submodule(transformers_name(name)).register_forward_pre_hook(_rounding(scale))
    return model.eval(), input_scales


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """transformers without its bar (which switches the hub's off, too) and warnings, and then as it was."""
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


def transformers_name(name: str) -> str:
    """Of a module, from its canonical name."""
    return f"model.{name.removeprefix('backbone.')}" if name.startswith("backbone.") else name


def _rounding(scale: float) -> Callable[[Any, tuple[Tensor]], tuple[Tensor]]:
    def before(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        return ((e4m3_codes(args[0], scale).float() * scale).to(args[0].dtype),)

    return before


def e4m3_codes(x: Tensor, scale: float) -> Tensor:
    """What a W8A8 product reads of x: x / scale in float8_e4m3fn, saturated."""
    return (x.float() / scale).clamp(-fp8.MAX, fp8.MAX).to(torch.float8_e4m3fn)
