# SPDX-License-Identifier: Apache-2.0
"""A GGUF file presents itself as a Hugging Face checkpoint: fields, names, and values as before conversion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, RopeScalingType
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenspeed.checkpoints import GgufVocabulary
from tokenspeed.checkpoints.gguf_source import open_gguf, open_vocabulary
from tokenspeed.checkpoints.source import OpenedModel
from tokenspeed.core.errors import CheckpointError, UnsupportedModelError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 16, 4, 2, 4, 10
Tensors = dict[str, np.ndarray]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def decoder_tensors() -> Tensors:
    return {
        "token_embd.weight": random(VOCAB, HIDDEN),
        "output_norm.weight": random(HIDDEN),
        "blk.0.attn_norm.weight": random(HIDDEN),
        "blk.0.attn_q.weight": random(HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": random(HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": random(HIDDEN),
        "blk.0.ffn_gate.weight": random(24, HIDDEN),
        "blk.0.ffn_up.weight": random(24, HIDDEN),
        "blk.0.ffn_down.weight": random(HIDDEN, 24),
    }


def add_decoder_fields(writer: GGUFWriter) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(24)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)


def save(path: Path, arch: str, tensors: Tensors, more: Callable[[GGUFWriter], None] = lambda writer: None) -> Path:
    writer = GGUFWriter(path, arch)
    add_decoder_fields(writer)
    writer.add_block_count(2 if any(name.startswith("blk.1") for name in tensors) else 1)
    more(writer)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(
    tmp_path: Path, arch: str, tensors: Tensors, more: Callable[[GGUFWriter], None] = lambda writer: None
) -> OpenedModel:
    return open_gguf(save(tmp_path / "model.gguf", arch, tensors, more))


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What conversion does to llama's query and key rows: the halves of each head interleaved."""
    return np.concatenate([np.stack(np.split(head, 2), 1).reshape(head.shape) for head in np.split(rows, num_heads)])


def test_llama_fields(tmp_path: Path) -> None:
    source = opened(tmp_path, "llama", decoder_tensors() | {"output.weight": random(VOCAB, HIDDEN)})
    expected = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": pytest.approx(1e-5),
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    assert {name: source.config[name] for name in expected} == expected
    assert source.tokenizer is None
    assert source.chat_template is None
    assert source.generation_config == {}


def test_llama_rows_are_put_back(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    query, key = tensors["blk.0.attn_q.weight"], tensors["blk.0.attn_k.weight"]
    bias = random(HEADS * HEAD_DIM)
    converted = tensors | {
        "blk.0.attn_q.weight": permuted(query, HEADS),
        "blk.0.attn_k.weight": permuted(key, KV_HEADS),
        "blk.0.attn_q.bias": permuted(bias, HEADS),
    }
    assert not np.array_equal(converted["blk.0.attn_q.weight"], query)
    source = opened(tmp_path, "llama", converted)
    weights = source.weights()
    attention = "model.layers.0.self_attn"
    np.testing.assert_array_equal(weights.read(f"{attention}.q_proj.weight", query.shape), query)
    np.testing.assert_array_equal(weights.read(f"{attention}.k_proj.weight", key.shape), key)
    np.testing.assert_array_equal(weights.read(f"{attention}.q_proj.bias", bias.shape), bias)
    value = tensors["blk.0.attn_v.weight"]
    np.testing.assert_array_equal(weights.read(f"{attention}.v_proj.weight", value.shape), value)
    assert source.config["attention_bias"] is True


def test_qwen3_names_and_no_permutation(tmp_path: Path) -> None:
    tensors = decoder_tensors() | {"blk.0.attn_q_norm.weight": random(HEAD_DIM)}
    source = opened(tmp_path, "qwen3", tensors)
    infos = source.weights().infos()
    assert infos is not None
    layer = "model.layers.0"
    assert set(infos) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        f"{layer}.input_layernorm.weight",
        f"{layer}.post_attention_layernorm.weight",
        *(f"{layer}.self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm")),
        *(f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    assert infos["model.embed_tokens.weight"].shape == (VOCAB, HIDDEN)
    assert infos["model.embed_tokens.weight"].dtype == "f32"
    query = source.weights().read(f"{layer}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN))
    np.testing.assert_array_equal(query, tensors["blk.0.attn_q.weight"])
    assert source.config["tie_word_embeddings"] is True


def test_gemma3_norms_and_layer_types(tmp_path: Path) -> None:
    tensors = decoder_tensors() | {
        "blk.0.post_attention_norm.weight": random(HIDDEN),
        "blk.0.post_ffw_norm.weight": random(HIDDEN),
    }

    def more(writer: GGUFWriter) -> None:
        writer.add_key_length(HEAD_DIM)
        writer.add_sliding_window(32)
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    source = opened(tmp_path, "gemma3", tensors, more)
    weights = source.weights()
    for gguf_name, name in (
        ("output_norm", "model.norm"),
        ("blk.0.ffn_norm", "model.layers.0.pre_feedforward_layernorm"),
        ("blk.0.post_attention_norm", "model.layers.0.post_attention_layernorm"),
        ("blk.0.post_ffw_norm", "model.layers.0.post_feedforward_layernorm"),
    ):
        got = weights.read(f"{name}.weight", (HIDDEN,))
        np.testing.assert_array_equal(got, tensors[f"{gguf_name}.weight"] - np.float32(1))
    assert source.config["model_type"] == "gemma3_text"
    assert source.config["layer_types"] == ["sliding_attention"]
    assert source.config["sliding_window"] == 32
    assert source.config["rope_theta"] == 1_000_000.0
    assert source.config["rope_local_base_freq"] == 10_000.0
    assert source.config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert source.config["query_pre_attn_scalar"] == HEAD_DIM


def test_yarn(tmp_path: Path) -> None:
    def more(writer: GGUFWriter) -> None:
        writer.add_string("qwen2.rope.scaling.type", "yarn")
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32768)

    source = opened(tmp_path, "qwen2", decoder_tensors(), more)
    assert source.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path, factor: float) -> None:
    theta, head_dim = 500_000.0, 64
    scaling = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    oracle = LlamaConfig(head_dim=head_dim, rope_parameters=scaling, max_position_embeddings=131072)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](oracle, device="cpu")
    plain = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    divisors = (plain / frequencies.numpy()).astype(np.float32)

    def more(writer: GGUFWriter) -> None:
        writer.add_key_length(head_dim)
        writer.add_rope_freq_base(theta)

    source = opened(tmp_path, "llama", decoder_tensors() | {"rope_freqs.weight": divisors}, more)
    expected = {name: value for name, value in scaling.items() if name != "rope_theta"}
    assert source.config["rope_scaling"] == expected
    infos = source.weights().infos()
    assert infos is not None
    assert not [name for name in infos if "rope" in name]

    twisted = divisors * np.linspace(1, 2, len(divisors), dtype=np.float32)
    with pytest.raises(UnsupportedModelError, match="not the llama3 rope scaling"):
        opened(tmp_path, "llama", decoder_tensors() | {"rope_freqs.weight": twisted}, more)


EXPERTS, EXPERT_FF = 3, 20


def expert_tensors() -> Tensors:
    return decoder_tensors() | {
        "blk.1.ffn_gate_inp.weight": random(EXPERTS, HIDDEN),
        "blk.1.ffn_gate_exps.weight": random(EXPERTS, EXPERT_FF, HIDDEN),
        "blk.1.ffn_up_exps.weight": random(EXPERTS, EXPERT_FF, HIDDEN),
        "blk.1.ffn_down_exps.weight": random(EXPERTS, HIDDEN, EXPERT_FF),
        "blk.1.ffn_gate_inp_shexp.weight": random(HIDDEN),
        "blk.1.ffn_gate_shexp.weight": random(28, HIDDEN),
    }


def add_expert_fields(writer: GGUFWriter) -> None:
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)


def test_experts_in_one_tensor_are_a_tensor_each(tmp_path: Path) -> None:
    """Under the names of a checkpoint that has them so; a row that was made a vector is one again."""
    tensors = expert_tensors()
    source = opened(tmp_path, "qwen2moe", tensors, add_expert_fields)
    expected = {"num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": False, "mlp_only_layers": [0]}
    expected |= {"model_type": "qwen2_moe", "qkv_bias": False}
    # Files of the first half of 2024 do not say how wide these are.
    expected |= {"moe_intermediate_size": EXPERT_FF, "shared_expert_intermediate_size": 28}
    assert {name: source.config[name] for name in expected} == expected
    weights, prefix = source.weights(), "model.layers.1.mlp"
    for name, gguf_name in (("gate", "ffn_gate"), ("up", "ffn_up"), ("down", "ffn_down")):
        for expert, values in enumerate(tensors[f"blk.1.{gguf_name}_exps.weight"]):
            read = weights.read(f"{prefix}.experts.{expert}.{name}_proj.weight", values.shape)
            np.testing.assert_array_equal(read, values)
    gate = weights.read(f"{prefix}.shared_expert_gate.weight", (1, HIDDEN))
    np.testing.assert_array_equal(gate[0], tensors["blk.1.ffn_gate_inp_shexp.weight"])
    assert not [name for name in weights.infos() or () if name.startswith("blk") or "{" in name]


def test_a_llama_with_experts_is_a_mixtral(tmp_path: Path) -> None:
    """Rows of q and k back in halves, as a llama's."""
    tensors = {name: values for name, values in expert_tensors().items() if "shexp" not in name}
    source = opened(tmp_path, "llama", tensors, add_expert_fields)
    assert (source.config["model_type"], source.config["num_local_experts"]) == ("mixtral", EXPERTS)
    weights = source.weights()
    down = weights.read("model.layers.1.block_sparse_moe.experts.2.w2.weight", (HIDDEN, EXPERT_FF))
    np.testing.assert_array_equal(down, tensors["blk.1.ffn_down_exps.weight"][2])
    heads = {"q": (HEADS * HEAD_DIM, HIDDEN), "k": (KV_HEADS * HEAD_DIM, HIDDEN)}
    name = "model.layers.0.self_attn.{}_proj.weight"
    own = {part: np.copy(weights.read(name.format(part), shape)) for part, shape in heads.items()}
    dense = opened(tmp_path, "llama", decoder_tensors()).weights()  # in the place of the other file
    for part, shape in heads.items():
        np.testing.assert_array_equal(own[part], dense.read(name.format(part), shape))


def test_experts_that_do_not_fit_their_metadata_are_faults(tmp_path: Path) -> None:
    def more(writer: GGUFWriter) -> None:
        writer.add_expert_count(EXPERTS + 1)
        writer.add_expert_used_count(2)

    with pytest.raises(CheckpointError, match=r"ffn_\w+_exps.weight has shape .3, .*, not that of 4 experts"):
        opened(tmp_path, "qwen3moe", expert_tensors(), more).weights()
    flat = expert_tensors() | {"blk.1.ffn_up_exps.weight": random(EXPERTS, HIDDEN)}
    with pytest.raises(CheckpointError, match="not that of 3 experts"):
        opened(tmp_path, "qwen3moe", flat, add_expert_fields).weights()
    with pytest.raises(CheckpointError, match="no layer has a tensor ffn_gate_exps"):
        opened(tmp_path, "qwen3moe", decoder_tensors(), add_expert_fields)
    with pytest.raises(CheckpointError, match=r"lacks qwen3moe\.expert_used_count"):
        opened(tmp_path, "qwen3moe", expert_tensors(), lambda writer: writer.add_expert_count(EXPERTS))


def long_rope(writer: GGUFWriter) -> None:
    writer.add_string("llama.rope.scaling.type", "longrope")
    writer.add_rope_scaling_factor(2.0)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported; .*: gemma3, llama, qwen2, qwen2moe"):
        opened(tmp_path, "mamba", decoder_tensors())
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        opened(tmp_path, "llama", decoder_tensors(), lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(UnsupportedModelError, match="longrope"):
        opened(
            tmp_path,
            "llama",
            decoder_tensors(),
            long_rope,
        )


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    writer = GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"lacks llama\.embedding_length"):
        open_gguf(path)


def test_a_field_of_a_wrong_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"llama\.rope\.freq_base is 'fast'; it must be a number"):
        opened(tmp_path, "llama", decoder_tensors(), lambda writer: writer.add_string("llama.rope.freq_base", "fast"))


def test_read_checks_name_and_shape(tmp_path: Path) -> None:
    weights = opened(tmp_path, "llama", decoder_tensors() | {"blk.0.surprise.weight": random(3)}).weights()
    infos = weights.infos()
    assert infos is not None
    assert "blk.0.surprise.weight" in infos  # for the accounting to report
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        weights.read("lm_head.weight", (VOCAB, HIDDEN))
    with pytest.raises(CheckpointError, match=r"output_norm\.weight\) has shape \(16,\); the model needs \(17,\)"):
        weights.read("model.norm.weight", (17,))


def with_vocabulary(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b", "ab", "<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    writer.add_token_types([1, 1, 1, 3, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(5)
    writer.add_bos_token_id(3)
    writer.add_chat_template("{{ messages }}")


def test_vocabulary_template_and_end_tokens(tmp_path: Path) -> None:
    source = opened(tmp_path, "qwen2", decoder_tensors(), with_vocabulary)
    vocabulary = source.tokenizer
    assert isinstance(vocabulary, GgufVocabulary)
    assert vocabulary.tokens == ("a", "b", "ab", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert vocabulary.token_types == (1, 1, 1, 3, 3, 3)
    assert vocabulary.merges == ("a b",)
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", "qwen2")
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id) == (3, 5, None)
    assert (vocabulary.add_bos, vocabulary.add_space_prefix) == (False, False)
    assert source.chat_template == "{{ messages }}"
    # The end of text ends generation too, though the file names only the end of turn.
    assert source.generation_config == {"bos_token_id": 3, "eos_token_id": [5, 3]}
    assert open_vocabulary(source.path) == (vocabulary, "{{ messages }}")


def test_spm_defaults(tmp_path: Path) -> None:
    def more(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", "\u2581a"])
        writer.add_token_scores([0.0, 0.0, 0.0, -1.0])
        writer.add_token_types([2, 3, 3, 1])

    vocabulary = opened(tmp_path, "llama", decoder_tensors(), more).tokenizer
    assert isinstance(vocabulary, GgufVocabulary)
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id) == (1, 2, 0)
    assert (vocabulary.add_bos, vocabulary.add_space_prefix, vocabulary.pre) == (True, True, "default")
    assert vocabulary.scores == (0.0, 0.0, 0.0, -1.0)


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    tensors = decoder_tensors() | {"token_embd.weight": random(3, HIDDEN)}
    with pytest.raises(CheckpointError, match="6 tokens, but the embedding only 3 rows"):
        opened(tmp_path, "qwen2", tensors, with_vocabulary)
