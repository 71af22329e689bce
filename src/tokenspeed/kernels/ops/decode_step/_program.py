# SPDX-License-Identifier: Apache-2.0
"""Device code from source to launch: NVRTC, which torch brings, compiles it once and a file keeps the result; the
driver loads and launches it.

Knows compilers, files and launches. Does not know what is computed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from tokenspeed.core.config import cache_dir

_log = logging.getLogger(__name__)

_SHARED_MEMORY_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_BFLOAT16, _SWIZZLE_128, _PROMOTE_256 = 9, 3, 3  # as the driver numbers them
TENSOR_MAP_BYTES = 128


class ProgramError(Exception):
    """Device code could not be compiled, loaded or launched; the message says why."""


class Program:
    """One kernel, loaded. Every block runs at once with the others, or the launch fails."""

    def __init__(self, binary: bytes, name: str, shared_memory: int) -> None:
        """For torch's current device. shared_memory: bytes of a block."""
        self._driver, self._shared_memory, self._context = _driver(), shared_memory, ctypes.c_void_p()
        torch.cuda.synchronize()  # makes the device's context this thread's
        _check(self._driver.cuCtxGetCurrent(ctypes.byref(self._context)), "find the device's context")
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(self._driver.cuModuleLoadData(ctypes.byref(module), binary), "load the kernel")
        _check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), f"find {name}")
        _check(
            self._driver.cuFuncSetAttribute(self._function, _SHARED_MEMORY_ATTRIBUTE, shared_memory),
            f"give {name} {shared_memory} bytes of shared memory",
        )

    def __call__(self, num_blocks: int, num_threads: int, params: ctypes.Structure) -> None:
        """Launch on torch's current stream; params are copied."""
        context = ctypes.c_void_p()
        self._driver.cuCtxGetCurrent(ctypes.byref(context))
        if not context:  # a thread that has launched nothing yet
            _check(self._driver.cuCtxSetCurrent(self._context), "use the device's context")
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(
            self._driver.cuLaunchCooperativeKernel(
                self._function, num_blocks, 1, 1, num_threads, 1, 1, self._shared_memory, stream, arguments
            ),
            "launch the kernel",
        )


def compiled(source: str, constants: Mapping[str, int], architecture: str) -> bytes:
    """The binary, from the cache where it is there. ProgramError with the compiler's words when it does not compile."""
    options = ["--std=c++17", f"--gpu-architecture={architecture}"]
    options += [f"--define-macro={name}={value}" for name, value in constants.items()]
    version = compiler_version()
    key = hashlib.sha256("\0".join([str(version), *options, source]).encode()).hexdigest()
    path = cache_dir() / "kernels" / f"{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        binary = _compile(source, options)
    _keep(path, binary)
    return binary


def compiler_version() -> tuple[int, int] | None:
    """Of NVRTC, None where there is none."""
    library = _compiler()
    if library is None:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def token_map(pages: torch.Tensor, num_tokens: int) -> bytes:
    """How the device copies 64 numbers each of num_tokens tokens of one head: TENSOR_MAP_BYTES of bytes. pages: (P,
    block_size, G, K) bfloat16, whose strides but the last are multiples of 8 numbers."""
    num_pages, block_size, num_heads, head_dim = pages.shape
    page_stride, token_stride, head_stride, _ = pages.stride()
    room = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
    aligned = -(-ctypes.addressof(room) // 64) * 64
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        _BFLOAT16,
        4,
        ctypes.c_void_p(pages.data_ptr()),
        (ctypes.c_uint64 * 4)(head_dim, block_size, num_heads, num_pages),
        (ctypes.c_uint64 * 3)(2 * token_stride, 2 * head_stride, 2 * page_stride),
        (ctypes.c_uint32 * 4)(64, num_tokens, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        0,
        _SWIZZLE_128,
        _PROMOTE_256,
        0,
    )
    _check(status, f"describe pages of {tuple(pages.shape)}")
    return ctypes.string_at(aligned, TENSOR_MAP_BYTES)


def _compile(source: str, options: list[str]) -> bytes:
    library = _compiler()
    if library is None:
        raise ProgramError("NVRTC is not installed")
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    texts = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = library.nvrtcCompileProgram(program, len(options), texts)
    size = ctypes.c_size_t()
    if status != 0:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        words = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, words)
        raise ProgramError(f"NVRTC says {status}: {words.value.decode(errors='replace')}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, binary)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def _keep(path: Path, binary: bytes) -> None:
    """A later start finds it; where nothing can be written it compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(binary)
        Path(file.name).replace(path)
    except OSError as error:
        _log.info("the compiled kernel is not kept: %s", error)


@functools.cache
def _compiler() -> ctypes.CDLL | None:
    """NVRTC: of the packages that torch comes with, or where the system finds it."""
    namespace = importlib.util.find_spec("nvidia")
    places = [] if namespace is None else list(namespace.submodule_search_locations or ())
    for pattern in ("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*"):
        for path in sorted(found for place in places for found in Path(place).glob(pattern)):
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))  # it looks for these by name alone
            return ctypes.CDLL(str(path))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status == 0:
        return
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(name))
    raise ProgramError(f"cannot {what}: {(name.value or b'an unknown error').decode()}")
