# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels many at a time, before the first of them runs: one after the other they take most of a start.

Knows how Triton launches; knows no kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def compiled_ahead(num_threads: int) -> Iterator[None]:
    """Launches of Triton kernels by this thread only compile within: num_threads at a time, all ready at the end. What
    they would have written holds whatever it held. Other threads launch as ever. Raises what a compilation raises."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    mode = importlib.import_module("triton.runtime._async_compile")
    functions = importlib.import_module("triton.runtime.jit").JITFunction
    launch, compile_one = functions.run, functions._do_compile

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiles_only = warmup or mode.active_mode.get() is not None
        return launch(function, *args, grid=grid, warmup=compiles_only, **options)

    def compile_once(function: Any, key: Any, signature: Any, device: Any, *others: Any) -> Any:
        kernel = compile_one(function, key, signature, device, *others)
        if mode.active_mode.get() is not None and kernel is not None:
            function.device_caches[device][0][key] = kernel  # else every launch until the end would ask for it anew
        return kernel

    with _one_at_a_time, ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as threads:
        functions.run, functions._do_compile = run, compile_once
        try:
            with mode.AsyncCompileMode(threads):
                yield
        finally:
            functions.run, functions._do_compile = launch, compile_one
