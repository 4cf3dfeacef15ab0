"""`hemiola quantize`: a BF16 or F32 checkpoint into a public quantised layout."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from hemiola.config.calibration import CalibrationConfig

_DEFAULTS = {field.name: str(field.default) for field in fields(CalibrationConfig)}


def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder or hub id of a BF16, F16 or F32 checkpoint.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Folder to write; it must not exist yet.")],
    scheme: Annotated[str, typer.Option(metavar="fp8|nvfp4|lightning", help="Layout of the result.")],
    calibrate: Annotated[
        str, typer.Option(metavar="FILE", help="UTF-8 text, or .json with lists of token ids, to measure scales on.")
    ],
    num_tokens: Annotated[
        int | None,
        typer.Option("--calibration-tokens", help="Tokens to run at most.", show_default=_DEFAULTS["num_tokens"]),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option("--calibration-window", help="Tokens per request.", show_default=_DEFAULTS["window"]),
    ] = None,
    four_over_six: Annotated[
        bool,
        typer.Option(
            help="NVFP4 block scales: the better of mapping a block's largest value to 6 or to 4. Without it always 6."
        ),
    ] = True,
) -> None:
    """Quantise a checkpoint, with activation scales measured on a text. DST appears whole at the end or not at all."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    import hemiola.quantize

    options = {name: value for name, value in (("num_tokens", num_tokens), ("window", window)) if value is not None}
    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=total)

        report = hemiola.quantize.quantize(
            source,
            target,
            scheme,
            calibrate,
            options=CalibrationConfig(**options),
            four_over_six=four_over_six,
            progress=advance,
        )
    typer.echo(_summary(report))


def _summary(report: Any) -> str:
    modules = ", ".join(
        f"{count:,} {algorithm} modules (relative weight error {report.weight_error[algorithm]:.2%})"
        for algorithm, count in report.num_modules.items()
    )
    share = report.num_bytes / report.source_bytes
    lines = [
        f"{report.folder}: {report.num_bytes:,} bytes of tensors, {share:.1%} of the source's {report.source_bytes:,}",
        f"{modules}; calibrated on {report.calibration_tokens:,} tokens",
    ]
    if unreached := report.unreached_experts:
        lines.append(f"{len(unreached)} experts met no calibration token and take the largest scale of their layer")
    return "\n".join(lines)
