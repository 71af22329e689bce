# SPDX-License-Identifier: Apache-2.0
"""GGUF architectures as Hugging Face checkpoints: config fields, tensor names, and what conversion changed.

Knows the key and tensor names of each architecture on both sides; reads no tensor but the rotary factors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tokenspeed.checkpoints.gguf import GgufFile, check_tensor
from tokenspeed.checkpoints.gguf_metadata import Metadata
from tokenspeed.core.errors import CheckpointError, UnsupportedModelError

Change = Literal["none", "unpermute_q", "unpermute_k", "norm_minus_one", "as_one_row", "per_expert"]
"""What undoes the conversion: rows of rotary pairs put back into halves, a norm weight less one, a vector made a matrix
of one row again, or the tensor of all experts cut into one for each."""

Config = dict[str, object]

_ROPE_FACTORS = "rope_freqs.weight"

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT_NAMES = {
    "qwen2_moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
}
_EXPERT_NAMES["qwen3_moe"] = _EXPERT_NAMES["qwen2_moe"]
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GEMMA3_WINDOW_PATTERN = 6
# The only published size whose attention is scaled by hidden/heads instead of the head size.
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, slots=True)
class Renamed:
    """A tensor's Hugging Face name, with {} for the number of an expert where each has its own, and what to do to its
    values."""

    name: str
    change: Change


def config_of(gguf: GgufFile) -> Config:
    """The config.json that the file's metadata amounts to. Raises UnsupportedModelError, CheckpointError."""
    metadata = Metadata(gguf.path, gguf.metadata)
    architecture = metadata.find_text("general.architecture")
    if architecture is None:
        raise CheckpointError(f"{gguf.path}: GGUF metadata lacks general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{gguf.path}: GGUF architecture {architecture!r} is not supported; "
            f"supported architectures: {', '.join(sorted(_ARCHITECTURES))}"
        )
    num_parts = metadata.find_int("split.count") or 1
    if num_parts > 1:
        raise UnsupportedModelError(
            f"{gguf.path}: this is one of {num_parts} parts of a split GGUF; merge the parts into one file first"
        )
    return _ARCHITECTURES[architecture](gguf, metadata)


def rename(config: Config, gguf_name: str) -> Renamed | None:
    """How the model knows the tensor `gguf_name`; None for one that the config has taken in.
    A name of no known meaning stays as it is, for the weight accounting to report."""
    if gguf_name == _ROPE_FACTORS:
        return None
    model_type = str(config["model_type"])
    is_gemma3 = model_type == "gemma3_text"
    stem, _, suffix = gguf_name.rpartition(".")
    layer = _LAYER.fullmatch(gguf_name)
    names = _GEMMA3_LAYER_NAMES if is_gemma3 else _LAYER_NAMES | _EXPERT_NAMES.get(model_type, {})
    if stem in _TOP_NAMES:
        name = f"{_TOP_NAMES[stem]}.{suffix}"
    elif layer and layer[2] in names:
        name = f"model.layers.{layer[1]}.{names[layer[2]]}.{suffix}"
    else:
        return Renamed(gguf_name, "none")
    if is_gemma3 and name.endswith("norm.weight"):
        return Renamed(name, "norm_minus_one")
    if model_type in ("llama", "mixtral") and layer and layer[2] in ("attn_q", "attn_k"):
        return Renamed(name, "unpermute_q" if layer[2] == "attn_q" else "unpermute_k")
    if "{}" in name:
        return Renamed(name, "per_expert")
    return Renamed(name, "as_one_row" if name.endswith("shared_expert_gate.weight") else "none")


def _llama(gguf: GgufFile, metadata: Metadata) -> Config:
    config = _decoder(gguf, metadata, "llama")
    if metadata.find_int("llama.expert_count"):
        return config | {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": metadata.need_int("llama.expert_count"),
            "num_experts_per_tok": metadata.need_int("llama.expert_used_count"),
            "sliding_window": None,
        }
    config["model_type"] = "llama"
    config["architectures"] = ["LlamaForCausalLM"]
    config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in gguf.tensors
    return config


def _qwen2(gguf: GgufFile, metadata: Metadata) -> Config:
    config = _decoder(gguf, metadata, "qwen2")
    return config | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}


def _qwen3(gguf: GgufFile, metadata: Metadata) -> Config:
    config = _decoder(gguf, metadata, "qwen3")
    config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    return config | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}


def _qwen2_moe(gguf: GgufFile, metadata: Metadata) -> Config:
    config = _with_experts(gguf, metadata, "qwen2moe")
    config["model_type"], config["architectures"] = "qwen2_moe", ["Qwen2MoeForCausalLM"]
    config["qkv_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    shared_size = metadata.find_int("qwen2moe.expert_shared_feed_forward_length")
    config["shared_expert_intermediate_size"] = shared_size or _rows_of(gguf, "ffn_gate_shexp", 0)
    return config | {"norm_topk_prob": False}


def _qwen3_moe(gguf: GgufFile, metadata: Metadata) -> Config:
    config = _with_experts(gguf, metadata, "qwen3moe")
    config["model_type"], config["architectures"] = "qwen3_moe", ["Qwen3MoeForCausalLM"]
    config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    return config | {"norm_topk_prob": True}


def _with_experts(gguf: GgufFile, metadata: Metadata, arch: str) -> Config:
    """Layers without a router are dense. Older files do not say how wide an expert is, but it is."""
    config = _decoder(gguf, metadata, arch)
    num_layers = metadata.need_int(f"{arch}.block_count")
    ff_size = metadata.find_int(f"{arch}.expert_feed_forward_length") or _rows_of(gguf, "ffn_gate_exps", 1)
    return config | {
        "num_experts": metadata.need_int(f"{arch}.expert_count"),
        "num_experts_per_tok": metadata.need_int(f"{arch}.expert_used_count"),
        "moe_intermediate_size": ff_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(num_layers) if f"blk.{i}.ffn_gate_inp.weight" not in gguf.tensors],
        "use_sliding_window": False,
    }


def _rows_of(gguf: GgufFile, name: str, dim: int) -> int:
    """What the first layer that has such a tensor has of rows."""
    found = (gguf.tensors[each] for each in gguf.tensors if each.endswith(f".{name}.weight"))
    tensor = next((each for each in found if len(each.shape) > dim), None)
    if tensor is None:
        raise CheckpointError(f"{gguf.path}: no layer has a tensor {name}.weight, and no metadata says its size")
    return tensor.shape[dim]


def _gemma3(gguf: GgufFile, metadata: Metadata) -> Config:
    config = _decoder(gguf, metadata, "gemma3", rope_theta=1_000_000.0)
    num_layers = metadata.need_int("gemma3.block_count")
    head_dim = metadata.need_int("gemma3.attention.key_length")
    scalar = head_dim
    if num_layers == _GEMMA3_27B_LAYERS:
        scalar = metadata.need_int("gemma3.embedding_length") // metadata.need_int("gemma3.attention.head_count")
    del config["hidden_act"]
    return config | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "head_dim": head_dim,
        "query_pre_attn_scalar": scalar,
        "sliding_window": metadata.need_int("gemma3.attention.sliding_window"),
        "layer_types": _gemma3_layer_types(metadata, num_layers),
        "rope_local_base_freq": metadata.find_float("gemma3.rope.freq_base_swa") or 10_000.0,
        "final_logit_softcapping": metadata.find_float("gemma3.final_logit_softcapping"),
        "attn_logit_softcapping": metadata.find_float("gemma3.attn_logit_softcapping"),
    }


def _gemma3_layer_types(metadata: Metadata, num_layers: int) -> list[str]:
    key = "gemma3.attention.sliding_window_pattern"
    period = _GEMMA3_WINDOW_PATTERN
    if metadata.has(key):
        try:
            period = metadata.need_int(key)
        except CheckpointError:
            flags = metadata.ints(key)
            if len(flags) != num_layers:
                raise
            return ["sliding_attention" if flag else "full_attention" for flag in flags]
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]


def _decoder(gguf: GgufFile, metadata: Metadata, arch: str, rope_theta: float = 10_000.0) -> Config:
    """The fields that all dense decoders share."""
    hidden_size = metadata.need_int(f"{arch}.embedding_length")
    num_heads = metadata.need_int(f"{arch}.attention.head_count")
    kv_key = f"{arch}.attention.head_count_kv"
    num_kv_heads = metadata.need_int(kv_key) if metadata.has(kv_key) else num_heads
    rotary_dim = metadata.find_int(f"{arch}.rope.dimension_count")
    head_dim = metadata.find_int(f"{arch}.attention.key_length") or rotary_dim or hidden_size // num_heads
    if rotary_dim is not None and rotary_dim != head_dim:
        raise UnsupportedModelError(
            f"{gguf.path}: rotary embedding over {rotary_dim} of {head_dim} head dimensions is not supported for {arch}"
        )
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{gguf.path}: {num_heads} heads cannot share {num_kv_heads} key-value heads evenly")
    rms_norm_eps = metadata.find_float(f"{arch}.attention.layer_norm_rms_epsilon")
    if rms_norm_eps is None:
        raise CheckpointError(f"{gguf.path}: GGUF metadata lacks {arch}.attention.layer_norm_rms_epsilon")
    theta = metadata.find_float(f"{arch}.rope.freq_base") or rope_theta
    config: Config = {
        "vocab_size": _vocab_size(gguf, metadata, arch),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.need_int(f"{arch}.feed_forward_length"),
        "num_hidden_layers": metadata.need_int(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.need_int(f"{arch}.context_length"),
        "rms_norm_eps": rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(gguf, metadata, arch) or _llama3_scaling(gguf, head_dim, theta),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "float32",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = metadata.find_int(f"tokenizer.ggml.{key}_token_id")
    return config


def _vocab_size(gguf: GgufFile, metadata: Metadata, arch: str) -> int:
    """The rows of the embedding: metadata may count fewer, as some models pad their vocabulary."""
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    return metadata.find_int(f"{arch}.vocab_size") or metadata.num_items("tokenizer.ggml.tokens")


def _rope_scaling(gguf: GgufFile, metadata: Metadata, arch: str) -> Config | None:
    kind = metadata.find_text(f"{arch}.rope.scaling.type")
    factor = metadata.find_float(f"{arch}.rope.scaling.factor")
    if kind is None and factor is None:
        factor = metadata.find_float(f"{arch}.rope.scale_linear")
        return None if factor in (None, 0.0, 1.0) else {"rope_type": "linear", "factor": factor}
    if kind == "none" or not factor:
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{gguf.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn, llama3"
        )
    original_len = metadata.find_int(f"{arch}.rope.scaling.original_context_length")
    scaling: Config = {"rope_type": "yarn", "factor": factor}
    if original_len:
        scaling["original_max_position_embeddings"] = original_len
    for field, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        value = metadata.find_float(f"{arch}.rope.scaling.{key}")
        if value is not None:
            scaling[field] = value
    attention_factor = metadata.find_float(f"{arch}.rope.scaling.attn_factor")
    if attention_factor not in (None, 1.0):
        raise UnsupportedModelError(
            f"{gguf.path}: yarn with rope.scaling.attn_factor {attention_factor} is not supported"
        )
    return scaling


def _llama3_scaling(gguf: GgufFile, head_dim: int, theta: float) -> Config | None:
    """Llama 3 scaling is written as a tensor of frequency divisors; find the parameters that give them."""
    tensor = gguf.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return None
    check_tensor(gguf, tensor)
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{gguf.path}: {_ROPE_FACTORS} is {tensor.type_name} {tensor.shape}, not F32 ({head_dim // 2},)"
        )
    divisors = gguf.raw(tensor).view(np.float32)
    factor = round(float(divisors.max()), 4)
    if factor == 1.0:
        return None
    for original_len in (8192, 4096, 16384, 32768, 131072):
        scaling: Config = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original_len,
        }
        if np.allclose(divisors, _llama3_divisors(head_dim, theta, factor, original_len), rtol=1e-4):
            return scaling
    raise UnsupportedModelError(f"{gguf.path}: {_ROPE_FACTORS} is not the llama3 rope scaling; no other is supported")


def _llama3_divisors(head_dim: int, theta: float, factor: float, original_len: int) -> list[float]:
    """Per rotary pair, what llama3 scaling (low 1, high 4) divides its frequency by."""
    low, high = 1.0, 4.0
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < original_len / high:
            divisors.append(1.0)
        elif wavelength > original_len / low:
            divisors.append(factor)
        else:
            smooth = (original_len / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


_ARCHITECTURES: dict[str, Callable[[GgufFile, Metadata], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma3": _gemma3,
}
