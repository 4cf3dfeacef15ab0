"""One linear's weight as it is stored: codes, scales, and what they stand for. Immutable; CPU; knows no files."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hemiola.errors import CheckpointError
from hemiola.formats.quant import nvfp4


class Scheme(enum.Enum):
    """How a linear's weight is stored."""

    PLAIN = "plain"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True, eq=False, slots=True)
class Weight:
    """A linear's weight, (out, in), in its stored form; tensors may be read-only views of a mapped file.

    name: the module, without ".weight". shape: logical (out, in), whatever the packing.
    data: PLAIN (out, in) bf16, fp16 or fp32; FP8 (out, in) float8_e4m3fn; NVFP4 (out, in / 2) uint8.
    block_scale: NVFP4 (out, in / 16) float8_e4m3fn, else None.
    scale: multiplies the weight: FP8 weight_scale, NVFP4 weight_scale_2; None when PLAIN.
    input_scale: activation scale of W8A8 and W4A4; never part of the weight's value. None when there is none on disk.
    """

    name: str
    shape: tuple[int, int]
    scheme: Scheme
    data: Tensor
    block_scale: Tensor | None = None
    scale: float | None = None
    input_scale: float | None = None

    def codes(self) -> Tensor:
        """What is stored, without `scale`: (out, in) float32.

        FP8: the e4m3 values. NVFP4: e2m1 times block scale, exact in bf16. PLAIN: the weight itself.
        """
        if self.block_scale is not None:
            return nvfp4.decode_unscaled(self.data, self.block_scale)
        return self.data.float()

    def dense(self) -> Tensor:
        """The weight's values, (out, in) float32, rounded once where a scale is applied."""
        return self.codes() if self.scale is None else self.codes() * self.scale

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes and block scales; the scalar scales are plain numbers here and count nothing."""
        return self.data.nbytes + (0 if self.block_scale is None else self.block_scale.nbytes)


@dataclass(frozen=True, eq=False, slots=True)
class ExpertBank:
    """One projection of all routed experts of a layer: weights of one shape and one scheme, in order of expert ids.

    name: the layer's experts and the projection, `<mixer>.experts.<projection>`.
    """

    name: str
    weights: tuple[Weight, ...]

    def __post_init__(self) -> None:
        first = self.weights[0]
        for weight in self.weights:
            if (weight.scheme, weight.shape) != (first.scheme, first.shape):
                raise CheckpointError(
                    "the experts of a layer differ in scheme or shape",
                    found=f"{weight.scheme.value} {weight.shape}",
                    expected=f"{first.scheme.value} {first.shape}, as {first.name}",
                    where=weight.name,
                )

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, expert: int) -> Weight:
        return self.weights[expert]

    def __iter__(self) -> Iterator[Weight]:
        return iter(self.weights)

    @property
    def scheme(self) -> Scheme:
        return self.weights[0].scheme

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of each expert."""
        return self.weights[0].shape


class SharedExpert(NamedTuple):
    """The expert of a layer that every token takes: (inter, in) and (in, inter), of any scheme each."""

    up: Weight
    down: Weight


class Experts(NamedTuple):
    """A layer's experts, as the op that runs them is called with them."""

    up: ExpertBank
    down: ExpertBank
    shared: SharedExpert | None
