"""Quantiser: from a BF16 or F32 checkpoint to one in a public quantised layout (see plan.py for the three schemes)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hemiola.config.calibration import CalibrationConfig
from hemiola.config.model import NemotronHConfig
from hemiola.errors import CheckpointError
from hemiola.formats.declaration import read_declaration
from hemiola.formats.manifest import Manifest
from hemiola.formats.problems import listed
from hemiola.formats.weight import Scheme
from hemiola.loading import open_manifest
from hemiola.quantize.calibrate import collect_amax, read_windows
from hemiola.quantize.plan import SCHEMES, QuantPlan
from hemiola.quantize.progress import Progress, quiet
from hemiola.quantize.scales import activation_scales, tap_names, weight_scales
from hemiola.quantize.write import Writer, appearing_whole, refuse_occupied
from hemiola.text.tokenizer import Tokenizer

__all__ = ["SCHEMES", "Progress", "QuantizeReport", "quantize"]


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What a quantisation did.

    source_bytes, num_bytes: of all tensors before and after. num_modules: quantised modules by algorithm ("FP8").
    weight_error: relative root mean square error of the weights by algorithm.
    calibration_tokens: tokens run. unreached_experts: those that calibration gave no input; their input_scale is the
    largest in their layer.
    """

    folder: Path
    scheme: str
    source_bytes: int
    num_bytes: int
    num_modules: dict[str, int]
    weight_error: dict[str, float]
    calibration_tokens: int
    unreached_experts: tuple[str, ...]


def quantize(
    source: str | Path,
    target: str | Path,
    scheme: str,
    calibration: str | Path,
    *,
    options: CalibrationConfig | None = None,
    four_over_six: bool = True,
    progress: Progress = quiet,
) -> QuantizeReport:
    """Write `source`, quantised, to the folder `target`, which appears whole at the end or not at all.

    source: folder or hub id of a BF16, F16 or F32 checkpoint. scheme: one of SCHEMES. calibration: UTF-8 text, which
    the source's tokenizer encodes, or a .json file with a list of lists of token ids. four_over_six: NVFP4 weights with
    the better of two scales per block (8 to 12 % less error on trained weights). False maps every block's
    largest value to 6: better for a model that was trained with its weights rounded that way, because it gives back the
    very values that the training used.

    Raises: ConfigError (unknown scheme); CheckpointError (the source is incomplete, quantised already, holds weights
        that cannot be quantised, or gave an activation no scale; the target exists); RequestError (the calibration
        file); each before anything is written. CapacityError.
    """
    target, calibration = Path(target), Path(calibration)
    refuse_occupied(target)
    folder, config, manifest = open_manifest(source)
    plan = QuantPlan.build(config, scheme)
    _refuse_quantized(manifest, config)
    options = options or CalibrationConfig()
    windows = read_windows(calibration, Tokenizer.from_folder(folder), options, config.max_position_embeddings - 1)
    scales = weight_scales(manifest, plan, four_over_six, progress)
    amax = collect_amax(folder, windows, tap_names(plan).values(), progress)
    activations = activation_scales(plan, amax, folder)
    with appearing_whole(target) as partial:
        tally = Writer(manifest, plan, scales, activations, four_over_six).write(partial, progress)
    return QuantizeReport(
        folder=target,
        scheme=scheme,
        source_bytes=sum(header.nbytes for header in manifest.checkpoint.headers.values()),
        num_bytes=tally.num_bytes,
        num_modules=dict(Counter(plan.algorithms[module.name].value for module in plan.quantized())),
        weight_error=tally.relative_rms(),
        calibration_tokens=sum(len(window) for window in windows),
        unreached_experts=activations.borrowed_experts,
    )


def _refuse_quantized(manifest: Manifest, config: NemotronHConfig) -> None:
    folder = manifest.checkpoint.folder
    quantized = [module.name for module in manifest.modules if module.scheme is not Scheme.PLAIN]
    declared = read_declaration(folder, config.quantization).source
    if quantized or declared or manifest.num_kv_scales:
        raise CheckpointError(
            "the source is quantised already",
            found=listed(quantized) or declared or "KV scales",
            expected="a BF16, F16 or F32 checkpoint",
            where=folder,
        )
