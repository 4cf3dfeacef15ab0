"""Weights on the device: built once per engine, in the form a kernel reads, and every uploaded byte counted.

A form is keyed by the weight's own name and the form's, never by an address. Host bytes go through two pinned buffers,
so that reading a mapped file, the copy over the bus and the packing on the device overlap; what is only needed to build
a form is freed by whoever builds it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Form = TypeVar("Form")

STAGING_BYTES = 64 << 20  # of each pinned buffer
_COPY_THREADS = 8  # reading a mapped file is bound by page faults, which threads take side by side


class ResidentWeights:
    """One engine's weights on `device`.

    uploaded_bytes: host bytes that were copied to the device so far. built: how often each (name, form) was built,
    which is once. resident_bytes: what the forms hold now.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.uploaded_bytes = 0
        self.built: dict[tuple[str, str], int] = {}
        self._forms: dict[tuple[str, str], Any] = {}
        self._staging: _Staging | None = None

    def get(self, name: str, form: str, build: Callable[[], Form]) -> Form:
        """The `form` of the weight `name`: a tensor, or a tuple of tensors and numbers; built at the first call."""
        key = (name, form)
        if key not in self._forms:
            self._forms[key] = build()
            self.built[key] = self.built.get(key, 0) + 1
        return cast(Form, self._forms[key])

    def upload(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of `tensor` on the device, in `out` where it is given (same shape and dtype, contiguous).

        A tensor that is on the device already is passed through (copied into `out`) and not counted.
        """
        if tensor.device.type == self.device.type:
            return tensor if out is None else out.copy_(tensor)
        if out is None:
            out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        self.uploaded_bytes += tensor.nbytes
        if self.device.type != "cuda":
            return out.copy_(tensor)
        if self._staging is None:
            self._staging = _Staging()
        self._staging.copy(_bytes(tensor), _bytes(out))
        return out

    def release_staging(self) -> None:
        """Give back the pinned buffers, when nothing is left to upload."""
        self._staging = None

    @property
    def resident_bytes(self) -> int:
        """Of distinct tensors: forms may share one."""
        sizes: dict[int, int] = {}
        for form in self._forms.values():
            for item in form if isinstance(form, tuple) else (form,):
                if isinstance(item, Tensor):
                    storage = item.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())


class _Staging:
    """Two pinned buffers that take turns: one is filled while the other's copy is under way."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._used = 0  # bytes of the current buffer whose copies are under way
        self._current = 0
        self._threads = ThreadPoolExecutor(_COPY_THREADS)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """source: bytes on the host; target: as many on the device."""
        for start in range(0, len(source), STAGING_BYTES):
            part = source[start : start + STAGING_BYTES]
            buffer = self._room(len(part))
            self._fill(buffer, part)
            target[start : start + len(part)].copy_(buffer, non_blocking=True)
            self._copied[self._current].record()

    def _room(self, num_bytes: int) -> Tensor:
        if self._used + num_bytes > STAGING_BYTES:
            self._current = 1 - self._current
            self._copied[self._current].synchronize()
            self._used = 0
        start = self._used
        self._used += -(-num_bytes // 16) * 16
        return self._buffers[self._current][start : start + num_bytes]

    def _fill(self, buffer: Tensor, part: Tensor) -> None:
        size = max(1 << 20, -(-len(part) // _COPY_THREADS))
        if len(part) <= size:
            buffer.copy_(part)
            return
        pieces = range(0, len(part), size)
        list(self._threads.map(lambda low: buffer[low : low + size].copy_(part[low : low + size]), pieces))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
