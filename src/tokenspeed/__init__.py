# SPDX-License-Identifier: Apache-2.0
"""TokenSpeed: an LLM inference engine for coding agents. Exports are lazy, so that importing a room loads no other."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_LAZY = {
    "LLM": "tokenspeed.llm.llm",
    "AsyncLLM": "tokenspeed.llm.async_llm",
    "SamplingParams": "tokenspeed.core.request",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'tokenspeed' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
