# SPDX-License-Identifier: Apache-2.0
"""A llama of one layer in a GGUF file, its matrices in blocks of any format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FF, VOCAB = 128, 4, 2, 32, 192, 72
Types = Mapping[str, str]


def write_gguf(path: Path, types: Types, seed: int = 3) -> Path:
    """A llama of one layer. types: of tensors by the end of their name; others are Q4_1."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate": (FF, HIDDEN),
        "blk.0.ffn_up": (FF, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FF),
    }
    rng = np.random.default_rng(seed)
    for name, shape in shapes.items():
        kind = GGMLQuantizationType[types.get(name.rpartition(".")[2], "Q4_1")]
        values = (rng.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32)
        writer.add_tensor(f"{name}.weight", quants.quantize(values, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
