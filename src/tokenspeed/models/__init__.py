# SPDX-License-Identifier: Apache-2.0
"""Model families: one file each, file name = `model_type` of config.json, so that adding one edits no list.

Knows configuration fields and checkpoint names. A family is single-device maths over layers; it does not know files,
kernels, steps or other families.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenspeed.core.errors import CheckpointError, UnsupportedModelError
from tokenspeed.layers.attention import AttentionSpec, KvSpec
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import AttentionNames, DecoderNames, DecoderSpec, LayerNames, NormSpec
from tokenspeed.layers.mla import MlaNames, MlaSpec
from tokenspeed.layers.moe import ExpertsSpec, MoeNames, MoeSpec, RouterSpec, SharedSpec
from tokenspeed.layers.rotary import LinearScaling, RotarySpec, WavelengthScaling, YarnScaling, yarn_temperature
from tokenspeed.layers.weight_map import Names, WeightMap, WeightSlot, renamed
from tokenspeed.spmd.graph import Graph, Value

__all__ = ["WeightMap", "WeightSlot"]

Config = Mapping[str, object]
_INTEGER_MAX, _NUMBER_MAX = (1 << 31) - 1, 1e300

_RENAMED = {"kimi_k2": "deepseek_v3"}
"""Types that are another one in all but name, and whose files need not name an architecture."""


# What most checkpoints call things. A family that differs replaces a field.
ATTENTION_NAMES = AttentionNames(("q_proj", "k_proj", "v_proj"), "o_proj", "q_norm", "k_norm", "sinks")
MLA_NAMES = MlaNames(
    q="q_proj",
    q_a="q_a_proj",
    q_norm="q_a_layernorm",
    q_b="q_b_proj",
    kv_a="kv_a_proj_with_mqa",
    kv_norm="kv_a_layernorm",
    kv_b="kv_b_proj",
    out="o_proj",
)
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
MOE_NAMES = MoeNames(
    router=("gate",),
    each=("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj"),
    stacked=("experts.gate_up_proj", "experts.down_proj"),
    correction=("gate.e_score_correction_bias",),
    shared=("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"),
)
LAYER_NAMES = LayerNames(("self_attn",), ("mlp",), "input_layernorm", "post_attention_layernorm")
DECODER_NAMES = DecoderNames(
    "model.embed_tokens", "model.layers.{}", "model.norm", "lm_head", ignored=("*.rotary_emb.inv_freq",)
)


class CausalLM(Protocol):
    """A built model, or a rank's part of one; its classes are torch modules. kv_specs: what a rank keeps, one entry for
    each of ForwardBatch.kv_layers."""

    kv_specs: tuple[KvSpec, ...]
    max_model_len: int
    vocab_size: int

    def declare(self, graph: Graph) -> Value:
        """Add the model's ops to a graph, from its source "token_ids" to the hidden states after the last norm. Their
        maths find a ForwardBatch in the step's context."""
        ...

    def declare_head(self, graph: Graph, hidden: Value) -> Value:
        """Add what turns hidden states into logits, (S, V) float32."""
        ...

    def weight_map(self) -> WeightMap:
        """Where the tensors of a checkpoint go."""
        ...

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Every parameter once."""
        ...

    def modules(self) -> Iterator[torch.nn.Module]:
        """The model and everything in it."""
        ...


Build = Callable[[Config, BuildContext], CausalLM]


@dataclass(frozen=True, slots=True)
class Family:
    """A file of this folder. build raises CheckpointError for a missing or wrong field and UnsupportedModelError for
    a feature that the family does not have here."""

    model_type: str
    build: Build


def supported() -> tuple[str, ...]:
    """The model types that can be built."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__)))


def resolve(config: Config) -> Family:
    """The family that `model_type` names, or `architectures` where that type is no file here. A multimodal
    configuration whose text_config is of a supported type is served as text. UnsupportedModelError names the supported
    ones."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"config.json asks for {method!r} quantisation, which is not supported yet; use the plain model or a GGUF"
        )
    model_type, family = config.get("model_type"), _family_of(config)
    if family is not None:
        return Family(str(model_type), importlib.import_module(f"{__name__}.{family}").build)
    text_config = config.get("text_config")
    if isinstance(text_config, Mapping) and _family_of(text_config) is not None:
        return _text_part(str(model_type), resolve(text_config))
    named = repr(model_type) if model_type is not None else "missing from config.json"
    raise UnsupportedModelError(f"model_type is {named}; supported are {', '.join(supported())}")


def _family_of(config: Config) -> str | None:
    """The file that serves a configuration. A model that only renames its type says in architectures what it is."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    names = [model_type, _RENAMED.get(model_type) if isinstance(model_type, str) else None]
    if isinstance(architectures, list | tuple) and architectures:
        words = re.findall(r"[A-Z][^A-Z]*", str(architectures[0]).removesuffix("ForCausalLM"))
        names.append("_".join(words).lower())
    return next((name for name in names if isinstance(name, str) and name in supported()), None)


class ConfigFields:
    """Typed reading of a configuration. None in the file counts as absent. Raises CheckpointError naming the field."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _INTEGER_MAX:
            raise CheckpointError(f"config.json: {name} is {value!r}, not a positive integer below 2 ** 31")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """As integer, of things of which there may be none."""
        return 0 if self._value(name, default) == 0 else self.integer(name, default)

    def optional_integer(self, name: str) -> int | None:
        return None if self._config.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _NUMBER_MAX:
            raise CheckpointError(f"config.json: {name} is {value!r}, not a number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.number(name, default)
        if value <= 0:
            raise CheckpointError(f"config.json: {name} is {value:g}; it must be above 0")
        return value

    def optional_number(self, name: str) -> float | None:
        return None if self._config.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name} is {value!r}, not true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"config.json: {name} is {value!r}, not a string")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"config.json: {name} is {value!r}, not a list of strings")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...] | None:
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
            raise CheckpointError(f"config.json: {name} is {value!r}, not a list of integers")
        return tuple(value)

    def section(self, name: str) -> Config:
        """A nested object, empty when absent."""
        value = self._config.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise CheckpointError(f"config.json: {name} is {value!r}, not an object")
        return value

    def require(self, name: str, default: str, supported_values: tuple[str, ...]) -> str:
        """A string field that must be one of what the family has here; UnsupportedModelError otherwise."""
        value = self.text(name, default)
        if value not in supported_values:
            raise UnsupportedModelError(f"{name} {value!r} is not supported; supported: {', '.join(supported_values)}")
        return value

    def _value(self, name: str, default: object) -> object:
        value = self._config.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"config.json: {name} is missing")
        return value


def head_dim_of(fields: ConfigFields) -> int:
    """head_dim, or hidden_size / num_attention_heads where the configuration has none."""
    return fields.optional_integer("head_dim") or fields.integer("hidden_size") // fields.integer("num_attention_heads")


def decoder_spec(fields: ConfigFields, max_model_len: int, eps: float = 1e-6) -> DecoderSpec:
    """The sizes around the layers, for families whose head is not tied and whose rms_norm_eps is `eps` unless the
    configuration says otherwise."""
    return DecoderSpec(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        max_model_len=max_model_len,
        norm=NormSpec(fields.positive("rms_norm_eps", eps)),
        tied=fields.flag("tie_word_embeddings", False),
    )


def attention_spec(fields: ConfigFields, head_dim: int, window: int | None = None) -> AttentionSpec:
    """Grouped-query attention with scores scaled by head_dim ** -0.5."""
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = kv_heads_of(fields, num_heads)
    return AttentionSpec(num_heads, KvSpec(num_kv_heads, head_dim, window), scale=head_dim**-0.5)


def kv_heads_of(fields: ConfigFields, num_heads: int, default: int | None = None) -> int:
    """num_key_value_heads, or as many as heads. CheckpointError when heads do not share them evenly."""
    num_kv_heads = fields.integer("num_key_value_heads", default or num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: {num_heads} attention heads cannot share num_key_value_heads {num_kv_heads} evenly"
        )
    return num_kv_heads


def moe_spec(router: RouterSpec, ff_size: int, shared: SharedSpec | None = None) -> MoeSpec:
    """Experts that gate with silu and have no biases. CheckpointError when a token asks for experts that are not
    there."""
    groups = router.groups
    if groups is not None and (router.num_experts % groups.num_groups or groups.num_chosen > groups.num_groups):
        raise CheckpointError(
            f"config.json: {groups.num_chosen} of {groups.num_groups} groups of {router.num_experts} experts: "
            "groups must be equal and no more may be chosen than there are"
        )
    reachable = router.num_experts
    if groups is not None:
        reachable = router.num_experts // groups.num_groups * groups.num_chosen
    if router.top_k > reachable:
        raise CheckpointError(f"config.json: num_experts_per_tok is {router.top_k}, a token can reach {reachable}")
    return MoeSpec(router, ExpertsSpec(router.num_experts, ff_size), shared)


def num_experts_of(fields: ConfigFields) -> int:
    """num_local_experts, or num_experts where the configuration calls it so."""
    return fields.optional_integer("num_local_experts") or fields.integer("num_experts")


def sparse_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Which layers have experts, for families with decoder_sparse_step and mlp_only_layers."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers") or ()
    return tuple((index + 1) % step == 0 and index not in dense for index in range(fields.integer("num_hidden_layers")))


def latent_rotary_spec(fields: ConfigFields) -> RotarySpec:
    """The turned part of a head of latent attention, whose neighbouring dimensions turn together unless
    rope_interleave says otherwise."""
    spec = rotary_spec(fields, fields.integer("qk_rope_head_dim", 64))
    return dataclasses.replace(spec, interleaved=fields.flag("rope_interleave", True))


def mla_spec(fields: ConfigFields, rope: RotarySpec) -> MlaSpec:
    """Latent attention. A stretched context with mscale_all_dim sharpens the scores by its temperature's square."""
    nope_dim, rope_dim = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    scaling = ConfigFields(fields.section("rope_parameters") or fields.section("rope_scaling"))
    mscale = scaling.optional_number("mscale_all_dim")
    temperature = yarn_temperature(rope.scaling.factor, mscale) if rope.scaling is not None and mscale else 1.0
    return MlaSpec(
        num_heads=fields.integer("num_attention_heads"),
        latent_dim=fields.integer("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim", 128),
        scale=(nope_dim + rope_dim) ** -0.5 * temperature**2,
        q_rank=fields.optional_integer("q_lora_rank"),
        bias=fields.flag("attention_bias", False),
    )


def window_layers(fields: ConfigFields) -> tuple[int | None, ...]:
    """The window of each layer for families with use_sliding_window, max_window_layers and layer_types."""
    num_layers = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28) if window is not None else num_layers
    default = tuple("sliding_attention" if index >= first else "full_attention" for index in range(num_layers))
    return layer_windows(fields, default, window)


def layer_windows(fields: ConfigFields, default: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer by layer_types; a layer type that is neither full nor sliding is refused."""
    layer_types = fields.texts("layer_types") or default
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"layer type {sorted(unknown)[0]!r} is not supported")
    if len(layer_types) != len(default):
        raise CheckpointError(f"config.json: layer_types has {len(layer_types)} entries for {len(default)} layers")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def rotary_spec(fields: ConfigFields, head_dim: int, parameters: Config | None = None) -> RotarySpec:
    """The rotary embedding. parameters: the object that describes it where the family keeps several; None reads
    rope_parameters, or rope_scaling and rope_theta of older files."""
    if parameters is None:
        parameters = fields.section("rope_parameters") or fields.section("rope_scaling")
    rope = ConfigFields(parameters)
    base = rope.positive("rope_theta", fields.number("rope_theta", 10_000.0))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"config.json: {rotary_dim} of the {head_dim} dimensions of a head would turn with their position; it must "
            "be an even number of them (partial_rotary_factor, head_dim)"
        )
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RotarySpec(base, rotary_dim)
    if kind == "linear":
        return RotarySpec(base, rotary_dim, LinearScaling(rope.positive("factor")))
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if low == high:
            raise CheckpointError(f"config.json: low_freq_factor and high_freq_factor are both {low:g}")
        return RotarySpec(
            base, rotary_dim, WavelengthScaling(rope.positive("factor"), low, high, _original_len(fields, rope))
        )
    if kind == "yarn":
        return RotarySpec(base, rotary_dim, _yarn(fields, rope))
    raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported: default, linear, llama3, yarn")


def context_len_of(fields: ConfigFields, spec: RotarySpec) -> int:
    """max_position_embeddings, stretched where a yarn scaling says that it is the original length."""
    context_len = fields.integer("max_position_embeddings", 2048)
    if isinstance(spec.scaling, YarnScaling):
        return max(context_len, int(spec.scaling.original_len * spec.scaling.factor))
    return context_len


def _original_len(fields: ConfigFields, rope: ConfigFields) -> int:
    outer = fields.optional_integer("original_max_position_embeddings")
    return outer or rope.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))


def _yarn(fields: ConfigFields, rope: ConfigFields) -> YarnScaling:
    original_len = _original_len(fields, rope)
    factor = fields.integer("max_position_embeddings") / original_len
    if rope.optional_number("factor") is not None:
        factor = rope.positive("factor")
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
        attention_factor = yarn_temperature(factor)
        if mscale and mscale_all:
            attention_factor = yarn_temperature(factor, mscale) / yarn_temperature(factor, mscale_all)
    beta_fast, beta_slow = rope.optional_number("beta_fast") or 32.0, rope.optional_number("beta_slow") or 1.0
    return YarnScaling(factor, original_len, attention_factor, beta_fast, beta_slow, rope.flag("truncate", True))


_OTHER_MODALITIES = ("*vision_tower.*", "*visual.*", "*multi_modal_projector.*", "*mm_projector.*")


def _text_part(outer_type: str, family: Family) -> Family:
    """The text model inside a multimodal checkpoint: names gain a prefix and the other modalities are ignored."""

    def build(config: Config, ctx: BuildContext) -> CausalLM:
        model = family.build(ConfigFields(config).section("text_config"), ctx)
        plain = model.weight_map()
        ignored = tuple(name for pattern in plain.ignored for name in _prefixed((pattern,)))
        widened = WeightMap(tuple(renamed(plain.slots, _prefixed)), ignored + _OTHER_MODALITIES)
        model.weight_map = lambda: widened  # type: ignore[method-assign]
        return model

    return Family(outer_type, build)


def _prefixed(names: Names) -> Names:
    """The names a multimodal checkpoint may give to a text tensor, older spelling first."""
    older = [f"language_model.{name}" for name in names]
    newer = [f"model.language_model.{name.removeprefix('model.')}" for name in names]
    return (*older, *newer, *names)
