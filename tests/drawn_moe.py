# SPDX-License-Identifier: Apache-2.0
"""GGUF files of models with experts, whose matrices are random blocks, and the same models of transformers: what is
written is what llama.cpp's conversion would write of those."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, quants

from tokenspeed.kernels.ops.packed_linear.cases import drawn

ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
FORMATS = ("q4_0", "q8_0", "q4_k", "q6_k")
HIDDEN, FF, VOCAB, EXPERTS, CHOSEN, LAYERS = 256, 256, 96, 6, 2, 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FF,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_experts_per_tok": CHOSEN,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": FF}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PLAIN = ("ffn_gate_inp", "ffn_gate_inp_shexp")


def oracle(family: str) -> transformers.PreTrainedModel:
    """Of random weights, the first layer dense in qwen3_moe."""
    if family == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=EXPERTS, sliding_window=None)
        return transformers.MixtralForCausalLM(config).eval()
    if family == "qwen2_moe":
        config = transformers.Qwen2MoeConfig(**SIZES, **QWEN, shared_expert_intermediate_size=FF)
        return transformers.Qwen2MoeForCausalLM(config).eval()
    config = transformers.Qwen3MoeConfig(**SIZES, **QWEN, norm_topk_prob=True, mlp_only_layers=[0])
    return transformers.Qwen3MoeForCausalLM(config).eval()


def write_moe(path: Path, family: str, form: str) -> transformers.PreTrainedModel:
    """The file, of matrices in blocks of the format; the model that it is."""
    torch.manual_seed(11)
    model, arch = oracle(family), ARCHITECTURES[family]
    writer = GGUFWriter(path, arch)
    _add_fields(writer, family)
    for number, (name, parameter) in enumerate(model.state_dict().items()):
        prefix, _, rest = name.partition(".mlp.experts.")
        if rest:
            layer = prefix.rpartition(".")[2]
            parts = ("gate", "up") if rest == "gate_up_proj" else ("down",)
            for place, (part, values) in enumerate(zip(parts, parameter.chunk(len(parts), dim=1), strict=True)):
                _add(writer, f"blk.{layer}.ffn_{part}_exps.weight", values, form, seed=9 * number + place)
        else:
            _add(writer, _gguf_name(name), parameter, form, seed=9 * number, permutes=family == "mixtral")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_fields(writer: GGUFWriter, family: str) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_vocab_size(VOCAB)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    if family == "qwen3_moe":
        writer.add_expert_feed_forward_length(FF)


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.{suffix}"


def _add(writer: GGUFWriter, name: str, values: torch.Tensor, form: str, *, seed: int, permutes: bool = False) -> None:
    """Matrices become random blocks, and `values` what these say; the rest is random numbers."""
    stem = name.split(".")[-2]
    if values.ndim == 1 or stem in PLAIN:
        generator = torch.Generator().manual_seed(seed)
        values.copy_(torch.randn(values.shape, generator=generator) * 0.1 + (1.0 if stem.endswith("norm") else 0.0))
        writer.add_tensor(name, values.numpy().squeeze(0) if stem == PLAIN[1] else values.numpy())
        return
    kind = GGMLQuantizationType[form.upper()]
    rows, columns = values.shape[-2:]
    blocks = drawn(form, values.numel() // columns, columns, seed).blocks_NB.numpy()
    values.copy_(torch.from_numpy(quants.dequantize(blocks, kind).reshape(values.shape)))
    if permutes and stem in ("attn_q", "attn_k"):
        blocks = blocks.reshape(rows // HEAD_DIM, 2, HEAD_DIM // 2, -1).swapaxes(1, 2)
    blocks = np.ascontiguousarray(blocks).reshape(*values.shape[:-1], -1)
    writer.add_tensor(name, blocks, raw_dtype=kind)
