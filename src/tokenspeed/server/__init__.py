# SPDX-License-Identifier: Apache-2.0
"""The HTTP face: wire dialects as codecs around one pipeline. Reaches the engine only through llm; torch-free."""
