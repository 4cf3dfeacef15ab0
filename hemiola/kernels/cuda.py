"""Kernels in CUDA C++, for what Triton cannot say: compiled at run time by NVRTC, launched on torch's current stream.

    module = CudaModule(Path(__file__).with_suffix(".cu").read_text(), options=("-DTILE=64",))
    scale = module.function("scale", "PPif")
    scale.launch((blocks, 1, 1), (256, 1, 1), (x, out, n, 0.5), shared_bytes=0, pdl=True)

Sources include no headers: there may be none. Kernels are `extern "C" __global__` with `__launch_bounds__`; what has no
annotation is a device function. `PRELUDE` stands before every source. A kernel that is launched with `pdl` calls
`gdc_wait()`, as in `hemiola.kernels.launch`.

NVRTC and the driver are reached with ctypes. NVRTC comes with torch's builds for CUDA; `missing()` says why there is
none. Compiled code is kept where Triton keeps its own (`TRITON_CACHE_DIR`, else ~/.triton/cache).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import struct
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from hemiola.kernels.launch import capability, compiles_only

__all__ = [
    "PRELUDE",
    "CudaCompileError",
    "CudaError",
    "CudaFunction",
    "CudaModule",
    "compile_source",
    "counter",
    "missing",
    "source_of",
    "tensor_map",
]

# Programmatic dependent launch, from sm_90 on; nothing before. The code that follows counts its own lines.
PRELUDE = """\
__device__ __forceinline__ void gdc_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void gdc_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// An int, ahead of gdc_wait, that no kernel which may still run writes: from L2, as none need have begun since it was.
__device__ __forceinline__ int load_early(const int *p) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
#line 1
"""
OPTIONS = ("-std=c++17", "-default-device")
NVRTC_MAJORS = ("13", "12")
# A signature's letters in the letters of the module struct, whose native alignment is that of C. Tensor maps, which
# want 64 bytes', come first.
LETTERS = {"P": "P", "i": "i", "l": "q", "f": "f", "T": "128s"}

# From cuda.h.
INVALID_CONTEXT = 201
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
PROGRAMMATIC_STREAM_SERIALIZATION = 6
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT = 128, 64
UINT8, NO_INTERLEAVE, SWIZZLE_128B, L2_PROMOTION_256B, ZEROS_OUTSIDE = 0, 0, 3, 3, 0
ATTRIBUTE = struct.Struct("=I4xi60x")  # CUlaunchAttribute: its id, then 64 bytes of its value
CONFIG = struct.Struct("@7IPPI")  # CUlaunchConfig: grid, block, shared bytes, stream, attributes, their count


def source_of(*names: str) -> str:
    """Files of this folder, one behind the other: what several kernels share comes first. Each counts its own lines."""
    folder = Path(__file__).parent
    return "".join(f'#line 1 "{name}"\n{(folder / name).read_text(encoding="utf-8")}' for name in names)


class CudaError(RuntimeError):
    """NVRTC or the driver is missing, or refused a call."""


class CudaCompileError(CudaError):
    """A source does not compile; the message is the compiler's log."""


def missing() -> str | None:
    """Why sources cannot be compiled here, or None."""
    try:
        _nvrtc()
    except CudaError as error:
        return str(error)
    return None


def _nvrtc_paths() -> Iterator[Path]:
    """Where NVRTC may be: torch's own major version first; in wheels, then where the loader looks for a name."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    for major in sorted(NVRTC_MAJORS, key=lambda major: not (torch.version.cuda or "").startswith(major)):
        library = f"libnvrtc.so.{major}"
        for folder in folders:
            yield from sorted(folder.glob(f"*/lib/{library}"))
        yield Path(library)


@cache
def _nvrtc() -> ctypes.CDLL:
    for path in _nvrtc_paths():
        try:
            if path.is_absolute():  # in a wheel, where NVRTC does not find its second library
                for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    raise CudaError(f"no libnvrtc.so of CUDA {' or '.join(NVRTC_MAJORS)}: it comes with nvidia-cuda-nvrtc")


@cache
def _nvrtc_version() -> str:
    major, minor = c_int(), c_int()
    _check_nvrtc(_nvrtc().nvrtcVersion(byref(major), byref(minor)))
    return f"{major.value}.{minor.value}"


def _check_nvrtc(result: int) -> None:
    if result:
        text = _nvrtc().nvrtcGetErrorString
        text.restype = c_char_p
        raise CudaError(f"NVRTC: {text(result).decode()}")


def compile_source(source: str, arch: int, options: tuple[str, ...] = ()) -> bytes:
    """The cubin of `source`, after the prelude, for sm_<arch>: from the cache, or compiled, which takes a second.

    On Hopper it is sm_90a, with the instructions of that GPU alone. CudaCompileError for a source that is wrong.
    """
    options = (f"-arch=sm_{arch}{'a' if arch == 90 else ''}", *OPTIONS, *options)
    key = hashlib.sha256(repr((PRELUDE + source, options, _nvrtc_version())).encode()).hexdigest()
    kept = get_cache_manager(key)
    path = kept.get_file("cubin")
    content = Path(path).read_bytes() if path else b""
    digest, cubin = content[:32], content[32:]
    if hashlib.sha256(cubin).digest() != digest:
        cubin = _compile((PRELUDE + source).encode(), options)
        kept.put(hashlib.sha256(cubin).digest() + cubin, "cubin")
    return cubin


def _compile(source: bytes, options: tuple[str, ...]) -> bytes:
    nvrtc = _nvrtc()
    program = c_void_p()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(byref(program), c_char_p(source), c_char_p(b"kernel.cu"), 0, None, None))
    try:
        arguments = (c_char_p * len(options))(*(option.encode() for option in options))
        result = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        if result:
            log = _read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            raise CudaCompileError(log or f"NVRTC: error {result}")
        return _read(program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _read(program: c_void_p, what: str) -> bytes:
    nvrtc = _nvrtc()
    size = c_size_t()
    _check_nvrtc(nvrtc[f"nvrtcGet{what}Size"](program, byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check_nvrtc(nvrtc[f"nvrtcGet{what}"](program, buffer))
    return buffer.raw


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no CUDA driver: {error}") from error
    library.cuModuleLoadData.argtypes = [POINTER(c_void_p), c_char_p]
    library.cuModuleGetFunction.argtypes = [POINTER(c_void_p), c_void_p, c_char_p]
    library.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
    library.cuLaunchKernelEx.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p]
    return library


def _check(result: int, what: str) -> None:
    if result:
        text = c_char_p()
        _driver().cuGetErrorString(result, byref(text))
        raise CudaError(f"{what}: {(text.value or b'unknown error').decode()} ({result})")


def _enter_context(device: int) -> None:
    """Make torch's context of a device that of this thread."""
    context = c_void_p()
    _check(_driver().cuDevicePrimaryCtxRetain(byref(context), device), f"the context of GPU {device}")
    _check(_driver().cuCtxSetCurrent(context), f"the context of GPU {device}")


def _aligned(size: int, alignment: int) -> tuple[Any, int]:
    """Memory with so many bytes, and where they begin in it."""
    memory = (c_uint64 * ((size + alignment) // 8))()
    return memory, -ctypes.addressof(memory) % alignment


def tensor_map(x: Tensor, box_rows: int) -> bytes:
    """What tells the tensor memory accelerator how x lies in memory: (rows, columns) of bytes, at an address and with a
    distance of rows that are multiples of 16.

    Boxes are of 128 columns and box_rows rows, up to 256, with 128-byte swizzle; past the end there are zeros.
    """
    if x.is_meta:
        return bytes(TENSOR_MAP_BYTES)
    rows, columns = x.shape
    return _tensor_map(x.data_ptr(), rows, columns, x.stride(0) if rows > 1 else columns, box_rows)


@lru_cache(maxsize=4096)
def _tensor_map(address: int, rows: int, columns: int, stride: int, box_rows: int) -> bytes:
    encode = _driver().cuTensorMapEncodeTiled
    encode.argtypes = [c_void_p, c_int, c_uint32, c_void_p, *(c_void_p,) * 4, *(c_int,) * 4]
    memory, offset = _aligned(TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT)
    sizes, strides = (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(stride)
    box, steps = (c_uint32 * 2)(128, box_rows), (c_uint32 * 2)(1, 1)
    arguments = (
        *(ctypes.addressof(memory) + offset, UINT8, 2, address, sizes, strides, box, steps),
        *(NO_INTERLEAVE, SWIZZLE_128B, L2_PROMOTION_256B, ZEROS_OUTSIDE),
    )
    result = encode(*arguments)
    if result == INVALID_CONTEXT:  # a thread that has used no GPU yet
        _enter_context(driver.active.get_current_device())
        result = encode(*arguments)
    _check(result, f"a tensor map of {rows} rows of {columns} bytes, {stride} apart, at {address:#x}")
    return bytes(memory)[offset : offset + TENSOR_MAP_BYTES]


@cache
def counter(device: torch.device, name: str) -> Tensor:
    """Two int32 zeros, in which a launch's blocks count what they take and how many of them have ended. The last one
    sets both back to zero. Kernels that share a name's run one after another."""
    return torch.zeros(2, dtype=torch.int32, device=device)


class CudaModule:
    """A source and its options, such as `-DTILE=64`. Compiled for the current GPU when a function of it is loaded."""

    def __init__(self, source: str, options: tuple[str, ...] = ()) -> None:
        self.source = source
        self.options = options
        self._lock = Lock()
        self._handles: dict[int, c_void_p] = {}

    def function(self, name: str, signature: str) -> CudaFunction:
        """The kernel `name`. signature: a letter an argument; P pointer, i int32, l int64, f float, T tensor map."""
        return CudaFunction(self, name, signature)

    def compile(self) -> bytes:
        """The cubin for the current GPU, from the cache from the second time on."""
        return compile_source(self.source, capability(), self.options)

    def load(self, device: int) -> c_void_p:
        """The driver's handle of this module on a GPU, the current one. Loaded once."""
        with self._lock:
            if device not in self._handles:
                if torch.cuda.is_current_stream_capturing():
                    raise CudaError(
                        "a CUDA module cannot be loaded while a graph is captured: load its functions before"
                    )
                cubin = self.compile()
                _enter_context(device)
                handle = c_void_p()
                _check(_driver().cuModuleLoadData(byref(handle), cubin), "loading a CUDA module")
                self._handles[device] = handle
            return self._handles[device]


class CudaFunction:
    """A kernel of a module. Any thread may launch it."""

    def __init__(self, module: CudaModule, name: str, signature: str) -> None:
        self.module = module
        self.name = name
        self.signature = signature
        letters = [LETTERS[letter] for letter in signature]
        ends = [struct.calcsize("@" + "".join(letters[: i + 1])) for i in range(len(letters))]
        sizes = [struct.calcsize(letter) for letter in letters]
        self.parameters = [(end - size, size) for end, size in zip(ends, sizes, strict=True)]  # their offsets and sizes
        # What a launch points to, written anew by each: the arguments, a pointer to each, the configuration.
        self._layout = struct.Struct("@" + "".join(letters))
        self._arguments, self._start = _aligned(self._layout.size, TENSOR_MAP_ALIGNMENT)
        start = ctypes.addressof(self._arguments) + self._start
        self._pointers = (c_void_p * len(letters))(*(start + offset for offset, _ in self.parameters))
        self._attribute = (c_uint64 * (ATTRIBUTE.size // 8))()
        ATTRIBUTE.pack_into(self._attribute, 0, PROGRAMMATIC_STREAM_SERIALIZATION, 1)
        self._attribute_at = ctypes.addressof(self._attribute)
        self._config = (c_uint64 * (CONFIG.size // 8 + 1))()
        self._lock = Lock()
        self._handles: dict[int, c_void_p] = {}
        self._shared: dict[int, int] = {}  # the dynamic shared memory that a launch may ask for, by device

    def load(self) -> None:
        """Compile and load for the current GPU. The first launch does it, unless a graph is being captured."""
        device = driver.active.get_current_device()
        module = self.module.load(device)
        handle = c_void_p()
        _check(_driver().cuModuleGetFunction(byref(handle), module, self.name.encode()), f"CUDA kernel {self.name}")
        self._handles[device] = handle

    def marshal(self, args: Sequence[Tensor | float | bytes | None]) -> None:
        """Write a launch's arguments to where the driver reads them. TypeError: they do not fit the signature."""
        values: list[Any] = [a.data_ptr() if isinstance(a, Tensor) else 0 if a is None else a for a in args]
        try:
            self._layout.pack_into(self._arguments, self._start, *values)
        except (struct.error, OverflowError) as error:
            raise TypeError(f"arguments of CUDA kernel {self.name} ({self.signature}): {error}") from error

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Tensor | float | bytes | None],
        shared_bytes: int = 0,
        pdl: bool = False,
    ) -> None:
        """Launch on torch's current stream of the current GPU.

        args: as in the signature; a tensor or None, the null pointer, for P, what `tensor_map` gives for T. TypeError
        for others. Devices, dtypes and layouts of tensors are the caller's. shared_bytes: dynamic shared memory of a
        block.
        pdl: programmatic dependent launch, for sm_90 and later; the kernel has to call `gdc_wait()`.
        """
        if compiles_only(self.module, self.module.compile):
            return
        device = driver.active.get_current_device()
        stream = driver.active.get_current_stream(device)
        if device not in self._handles:
            self.load()
        handle = self._handles[device]
        with self._lock:
            self.marshal(args)
            attributes = (self._attribute_at, 1) if pdl else (0, 0)
            CONFIG.pack_into(self._config, 0, *grid, *block, shared_bytes, stream, *attributes)
            if shared_bytes > self._shared.get(device, 0):
                self._allow_shared(device, shared_bytes)
            result = _driver().cuLaunchKernelEx(self._config, handle, self._pointers, None)
            if result == INVALID_CONTEXT:  # a thread that has used no GPU yet
                _enter_context(device)
                result = _driver().cuLaunchKernelEx(self._config, handle, self._pointers, None)
        if result:
            _check(result, f"launch of CUDA kernel {self.name}")

    def _allow_shared(self, device: int, shared_bytes: int) -> None:
        _enter_context(device)
        what = f"{shared_bytes} bytes of shared memory for CUDA kernel {self.name}"
        _check(_driver().cuFuncSetAttribute(self._handles[device], MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes), what)
        self._shared[device] = shared_bytes
