# SPDX-License-Identifier: Apache-2.0
"""The instruction sets of the CPU kernels in turn, and what Triton's interpreter needs here: loops whose bounds are
tensors, and no time spent on what never changes.

The interpreter asks numpy for the integer that an array of one number holds, which numpy 2.4 refuses. At each call of
a device function it puts its own operations into the language again; here they are put in once and stay, since nothing
is compiled in a process that interprets. It works out whether integers overflow and then, without its debug option,
does not look at the answer. It builds the shape and the types of each tensor anew.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cpu_isas import chosen, isas


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that an element which a kernel forgets shows."""
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")  # as use_deterministic_algorithms, which also imports a compiler
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(params=isas() or [None])
def cpu_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    """An instruction set, which the compiled CPU kernels use; None for what is not of theirs. Each packed matrix ends
    where its memory does, so that who reads on is seen by AddressSanitizer."""
    memory = "tokenspeed.kernels.ops.packed_linear.cpu._Memory"
    monkeypatch.setattr(f"{memory}._CHUNK_BYTES", 0)
    monkeypatch.setattr(f"{memory}._ALIGNMENT", 1)
    if request.param is None:
        yield None
        return
    with chosen(request.param):
        yield request.param


def _prepare_interpreter() -> None:
    from triton import language
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    interpreter._patch_lang = _once(interpreter._patch_lang, (language, language.core), interpreter._LangPatchScope)
    interpreter._get_np_dtype = _with_known_dtypes(interpreter._get_np_dtype)
    _share_shapes(language.core)
    interpreter._convert_float = _with_rounding_to_8_bits(interpreter._convert_float)


def _with_index(patch_tensor: Callable[..., None]) -> Callable[..., None]:
    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def _with_rounding_to_8_bits(convert: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter loses the carry of a mantissa that is rounded up, and the small numbers of e4m3."""

    def rounded(array: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        if output_dtype.name != "fp8e4nv" or input_dtype.name != "fp32":
            return convert(array, input_dtype, output_dtype, rounding_mode)
        values = torch.from_numpy(array.astype("float32")).to(torch.float8_e4m3fn)
        return values.view(torch.uint8).numpy().reshape(array.shape)

    return rounded


def _once(patch_language: Callable[..., Any], languages: tuple[Any, ...], make_scope: Callable[[], Any]) -> Any:
    """Leaves in place what the first function to see a module of the language puts into it."""
    done: set[int] = set()
    known: set[int] = set()

    def patch(function: Any) -> Any:
        if id(function) not in known:
            visible = {id(value) for value in function.__globals__.values() if value in languages}
            if not visible or visible - done:
                patch_language(function)
            done.update(visible)
            known.add(id(function))
        return make_scope()

    return patch


def _share_shapes(core: Any) -> None:
    """A shape, what a block of it is called and how many numbers it has: once for all tensors that have it."""

    @functools.cache
    def tensor_parts(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    @functools.cache
    def block_parts(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        shape = core.tuple(sizes)
        return shape, core.validate_block_shape(shape), str(shape)

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = tensor_parts(tuple(kind.shape.values) if kind.is_block() else ())

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        self.shape, self.numel, text = block_parts(tuple(sizes))
        self.element_ty, self.name = element_ty, f"<{text}, {element_ty}>"

    core.tensor.__init__ = init_tensor
    core.block_type.__init__ = init_block


def _with_known_dtypes(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    by_name: dict[str, Any] = {}

    def dtype_of(kind: Any) -> Any:
        scalar = kind.scalar
        name = "" if scalar.is_ptr() else scalar.name
        if name not in by_name:
            by_name[name] = convert(scalar)
        return by_name[name]

    return dtype_of


if importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
    _prepare_interpreter()
