"""Headers of safetensors files, read without touching a payload.

Reads names, dtypes, shapes and byte ranges, and tells a truncated file from a whole one. Payloads are read by the
safetensors library (see checkpoint.py). Source: the format description of the safetensors library: a little-endian
uint64 header length, a JSON header, then the payloads, whose offsets count from the end of the header.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from hemiola.errors import CheckpointError

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
"""Bytes per element of the dtypes that occupy whole bytes, by their name on disk."""

_LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_DOWNLOAD_AGAIN = "Download or copy the file again."


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file says about one tensor. dtype: its name on disk ("BF16"). offset: of the payload in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_header(file: Path) -> list[TensorHeader]:
    """The tensors of one file, in file order. Their payloads may lie past the end of a truncated file.

    Raises: CheckpointError when the header itself is cut short, is not JSON, or contradicts itself.
    """
    try:
        with file.open("rb") as stream:
            head = stream.read(8)
            length = int.from_bytes(head, "little")
            raw = stream.read(length) if len(head) == 8 and length <= _LARGEST_HEADER else b""
    except OSError as error:
        raise CheckpointError("cannot be read", found=error.strerror, where=file, remedy=_DOWNLOAD_AGAIN) from error
    if len(head) < 8 or len(raw) < length:
        raise CheckpointError(
            "the safetensors header is truncated or not a header",
            found=f"{file.stat().st_size} bytes in the file",
            expected=f"at least {8 + length} bytes" if len(head) == 8 else "at least 8 bytes",
            where=file,
            remedy=_DOWNLOAD_AGAIN,
        )
    try:
        entries = json.loads(raw)
        headers = [
            _parse_entry(name, entry, file, base=8 + length)
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = "the safetensors header is damaged"
        raise CheckpointError(problem, found=error, where=file, remedy=_DOWNLOAD_AGAIN) from error
    return sorted(headers, key=lambda header: header.offset)


def _parse_entry(name: str, entry: dict[str, object], file: Path, base: int) -> TensorHeader:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise ValueError(f"entry of {name!r} is {entry}")
    begin, end = offsets
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"entry of {name!r} is {entry}")
    if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name!r} is {dtype} {shape} but occupies {end - begin} bytes")
    return TensorHeader(name, dtype, tuple(shape), file, base + begin, end - begin)
