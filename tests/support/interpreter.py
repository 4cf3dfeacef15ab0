"""Repairs of Triton's CPU interpreter (TRITON_INTERPRET=1), so that it computes what a GPU computes.

The interpreter keeps bfloat16 and fp8 values as raw integers and does arithmetic on those integers, truncates where the
hardware rounds, lets NaN through `tl.maximum`, and knows neither dependent launch nor autotuning. `repair()`
replaces those parts. It must run in a process that had TRITON_INTERPRET=1 before triton was imported, and before any
kernel module is imported; tests/kernels/conftest.py sees to both. Works with triton 3.6 and 3.7.

What no repair brings: races, reads out of bounds, speed, inline assembly, libdevice, tl.dot_scaled. Programs run one
after another, so a kernel whose programs depend on each other's order passes here and fails on a GPU.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import autotuner, interpreter

Array = np.ndarray
Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder

# The types that the interpreter keeps as raw integers: their torch type, and the largest value of a conversion
# (cvt.rn.satfinite for fp8; a bfloat16 overflows to infinity).
RAW: dict[Any, tuple[torch.dtype, float | None]] = {
    tl.bfloat16: (torch.bfloat16, None),
    tl.float8e4nv: (torch.float8_e4m3fn, 448.0),
    tl.float8e5: (torch.float8_e5m2, 57344.0),
}
TF32 = interpreter._ir.INPUT_PRECISION.TF32
PROPAGATE_NONE = interpreter._ir.PROPAGATE_NAN.NONE


def widen(handle: Handle) -> Array:
    """The values of a handle: float32 for the raw types, as they are for others."""
    kind = handle.dtype.scalar
    if kind not in RAW:
        return handle.data
    return torch.from_numpy(np.array(handle.data)).view(RAW[kind][0]).float().numpy()


def narrow(values: Any, kind: Any) -> Handle:
    """A handle of type `kind` (a scalar type), rounded to nearest even if it is a raw one."""
    if kind not in RAW:
        return Handle(np.asarray(values, dtype=interpreter._get_np_dtype(kind)), kind)
    dtype, largest = RAW[kind]
    tensor = torch.from_numpy(np.array(values, dtype=np.float32))
    if largest is not None:
        tensor = tensor.clamp(-largest, largest)
    return Handle(tensor.to(dtype).view(torch.uint16 if dtype.itemsize == 2 else torch.uint8).numpy(), kind)


def _cast(original: Callable[..., Handle]) -> Callable[..., Handle]:
    def cast_impl(self: Builder, source: Handle, target: Any) -> Handle:
        kind = target.scalar
        if source.dtype.scalar == kind or not {source.dtype.scalar, kind} & RAW.keys():
            return original(self, source, target)
        return narrow(widen(source), kind)

    return cast_impl


def _elementwise(original: Callable[..., Handle], count: int) -> Callable[..., Handle]:
    """Arithmetic on raw types: in float32, the result rounded. Selecting needs no arithmetic."""

    def run(self: Builder, *args: Any) -> Handle:
        operands, function = args[:count], args[count]
        kinds = [operand.dtype.scalar for operand in operands]
        raw = next((kind for kind in kinds if kind in RAW), None)
        if raw is None or function is np.where:
            return original(self, *args)
        result = np.asarray(function(*(widen(operand) for operand in operands)))
        return Handle(result, tl.int1) if result.dtype == np.bool_ else narrow(result, raw)

    return run


def _fma(self: Builder, x: Handle, y: Handle, z: Handle) -> Handle:
    """One rounding at the end: the product of two float32 is exact in float64."""
    kind = z.dtype.scalar
    if kind == tl.float64:
        return Handle(x.data * y.data + z.data, kind)
    product = widen(x).astype(np.float64) * widen(y).astype(np.float64)
    return narrow((product + widen(z)).astype(np.float32), kind)


def _clamp(self: Builder, x: Handle, low: Handle, high: Handle, propagate_nan: Any) -> Handle:
    values, lowest, highest = widen(x), widen(low), widen(high)
    if propagate_nan == PROPAGATE_NONE:
        return narrow(np.fmin(np.fmax(values, lowest), highest), x.dtype.scalar)
    return narrow(np.clip(values, lowest, highest), x.dtype.scalar)


def _dot(self: Builder, a: Handle, b: Handle, accumulator: Handle, input_precision: Any, imprecise: int) -> Handle:
    """Operands of up to 16 bits are exact in float32, in which sums are taken; TF32 has to be asked for elsewhere."""
    if a.dtype.scalar == tl.float32 and input_precision == TF32:
        raise ValueError("tl.dot of float32 runs in TF32 by default: say input_precision")
    kind = accumulator.dtype.scalar
    total = np.float32 if kind in RAW or kind == tl.float16 else accumulator.data.dtype
    product = np.matmul(widen(a).astype(total), widen(b).astype(total))
    return narrow(product + widen(accumulator).astype(total), kind)


def _combine(operation: Any, left: list[Array], right: list[Array], kinds: list[Any]) -> list[Array]:
    """A user's combining function on whole vectors."""

    def tensors(arrays: list[Array]) -> list[Any]:
        return [operation.to_tensor(array, kind) for array, kind in zip(arrays, kinds, strict=True)]

    result = operation.combine_fn.fn(*tensors(left), *tensors(right))
    parts = result if isinstance(result, (tuple, tl.tuple)) else (result,)
    return [np.asarray(part.handle.data) for part in parts]


def _vectors(operation: Any, inputs: Any) -> tuple[list[Array], tuple[int, ...], list[Any]]:
    """Each input as (length of the axis, everything else), the shape of everything else, and the types."""
    moved = [np.moveaxis(part.handle.data, operation.axis, 0) for part in inputs]
    return [part.reshape(part.shape[0], -1) for part in moved], moved[0].shape[1:], [part.dtype for part in inputs]


def _scan(self: Any, inputs: Any) -> list[Any]:
    data, rest, kinds = _vectors(self, inputs)
    rows = [[part[0] for part in data]]
    for i in range(1, data[0].shape[0]):
        rows.append(_combine(self, rows[-1], [part[i] for part in data], kinds))
    stacked = [np.stack(part).reshape(-1, *rest) for part in zip(*rows, strict=True)]
    return [
        self.to_tensor(np.ascontiguousarray(np.moveaxis(part, 0, self.axis)), kind)
        for part, kind in zip(stacked, kinds, strict=True)
    ]


def _reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    def generic_reduce(self: Any, inputs: Any) -> Any:
        if self.axis is None:
            return original(self, inputs)
        data, rest, kinds = _vectors(self, inputs)
        row = [part[0] for part in data]
        for i in range(1, data[0].shape[0]):
            row = _combine(self, row, [part[i] for part in data], kinds)
        shaped = [part.reshape(rest) for part in row]
        if self.keep_dims:
            shaped = [np.expand_dims(part, self.axis) for part in shaped]
        return [
            self.to_tensor(part if part.shape else part.item(), kind) for part, kind in zip(shaped, kinds, strict=True)
        ]

    return generic_reduce


def _first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())


def _as_index(original: Callable[..., None]) -> Callable[..., None]:
    """numpy 2.4 converts no array of one element to an int."""

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    return patch


def _silent(original: Callable[..., None]) -> Callable[..., None]:
    """Infinities and NaN are values in a kernel, not warnings."""

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            original(self, *args, **kwargs)

    return call


def _nothing() -> None:
    """Programmatic dependent launch where programs run one after another."""


def repair() -> None:
    """Replace the parts of the interpreter that compute something else than a GPU. Once per process."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("the interpreter is off: set TRITON_INTERPRET=1 before triton is imported")
    # Triton loads this module twice: as an attribute of its package, and as what an import finds.
    cuda = (tl.extra.cuda, importlib.import_module("triton.language.extra.cuda"))
    if cuda[1].gdc_wait is _nothing:
        return
    if any(name.startswith("hemiola.kernels.") for name in sys.modules):
        raise RuntimeError("a kernel module was imported before the interpreter was repaired")
    Builder.cast_impl = _cast(Builder.cast_impl)
    Builder.create_fp_to_fp = lambda self, source, target, rounding: self.cast_impl(source, target)
    Builder.get_bf16 = lambda self, value: narrow([value], tl.bfloat16)
    Builder.unary_op = _elementwise(Builder.unary_op, 1)
    Builder.binary_op = _elementwise(Builder.binary_op, 2)
    Builder.ternary_op = _elementwise(Builder.ternary_op, 3)
    Builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    Builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    Builder.create_fma = _fma
    Builder.create_clampf = _clamp
    Builder.create_dot = _dot
    interpreter.ScanOps.generic_scan = _scan
    interpreter.ReduceOps.generic_reduce = _reduce(interpreter.ReduceOps.generic_reduce)
    interpreter._patch_lang_tensor = _as_index(interpreter._patch_lang_tensor)
    interpreter.GridExecutor.__call__ = _silent(interpreter.GridExecutor.__call__)
    autotuner.Autotuner.run = _first_config
    for module in cuda:
        module.gdc_wait = module.gdc_launch_dependents = _nothing
