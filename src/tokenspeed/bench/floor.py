# SPDX-License-Identifier: Apache-2.0
"""The least time that a model needs for a step: bytes that must be read and operations that must be done, over what the
machine was measured to do.

Knows a model's configuration and its number of parameters. Torch-free. Does not know how anything is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a machine does at most in a second. device: its name. cache_bytes: what rotates through less than this may
    be read from a cache."""

    device: str
    read_bytes_s: float
    flop_s: float
    cache_bytes: int

    def floor_s(self, num_bytes: float, flop: float) -> float:
        """The least time for so much."""
        return max(num_bytes / self.read_bytes_s, flop / self.flop_s)

    def __str__(self) -> str:
        return f"{self.device}: reads {self.read_bytes_s / 1e12:.3f} TB/s, computes {self.flop_s / 1e12:.3g} TFLOP/s"


@dataclass(frozen=True, slots=True)
class Experts:
    """Layers in which a token passes through `num_active` of `num_experts`, each of `size` parameters."""

    num_layers: int
    num_experts: int
    num_active: int
    size: int

    def expected(self, num_tokens: int) -> float:
        """Distinct experts of a layer that so many tokens meet when each chooses evenly."""
        return self.num_experts * (1.0 - (1.0 - self.num_active / self.num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """num_dense: parameters that every token is multiplied with, the head not among them; num_head: the head's.
    kv_bytes: of a token in one layer. pair_flop: of a query and a key in one layer. windows: of each layer, None where
    it attends all."""

    num_dense: int
    num_head: int
    experts: Experts | None
    itemsize: float
    kv_bytes: float
    pair_flop: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any], num_parameters: int, dtype: str, kv_bytes_token: float) -> ModelCost:
        """config: as in config.json. kv_bytes_token: of a token in all layers."""
        hidden, num_layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        num_head = int(config["vocab_size"]) * hidden
        is_tied = bool(config.get("tie_word_embeddings", False))
        experts = _experts(config, hidden, num_layers)
        num_routed = 0 if experts is None else experts.num_layers * experts.num_experts * experts.size
        num_dense = max(0, num_parameters - num_routed - num_head * (1 if is_tied else 2))
        kv_bytes = kv_bytes_token / num_layers
        return cls(
            num_dense, num_head, experts, _ITEMSIZES[dtype], kv_bytes, _pair_flop(config, hidden), _windows(config)
        )

    def decode(self, context_lens: tuple[int, ...]) -> tuple[float, float]:
        """(bytes, operations) of a step that decodes one token after each of these contexts."""
        num_rows = len(context_lens)
        experts = self.experts
        num_read = self.num_dense + self.num_head
        num_used = self.num_dense + self.num_head
        if experts is not None:
            num_read += int(experts.num_layers * experts.expected(num_rows) * experts.size)
            num_used += experts.num_layers * experts.num_active * experts.size
        seen = sum(min(length, window or length) for length in context_lens for window in self.windows)
        return num_read * self.itemsize + seen * self.kv_bytes, 2 * num_used * num_rows + seen * self.pair_flop

    def prefill(self, num_new: int, num_cached: int = 0) -> tuple[float, float]:
        """(bytes, operations) of a prompt of which num_new tokens follow num_cached that are there. Bytes: the weights
        and the cached tokens once."""
        experts = self.experts
        num_used = self.num_dense
        num_read = self.num_dense + self.num_head
        if experts is not None:
            num_used += experts.num_layers * experts.num_active * experts.size
            num_read += int(experts.num_layers * experts.expected(num_new) * experts.size)
        pairs = sum(_pairs(num_new, num_cached, window) for window in self.windows)
        num_bytes = num_read * self.itemsize + num_cached * self.kv_bytes * len(self.windows)
        return num_bytes, 2 * num_used * num_new + 2 * self.num_head + pairs * self.pair_flop


def _pairs(num_new: int, num_cached: int, window: int | None) -> int:
    """Positions that new tokens attend, themselves included."""
    if window is None or num_cached + num_new <= window:
        return num_new * num_cached + num_new * (num_new + 1) // 2
    num_growing = max(0, window - num_cached)  # tokens that still see all before them
    return num_growing * num_cached + num_growing * (num_growing + 1) // 2 + (num_new - num_growing) * window


def _pair_flop(config: Mapping[str, Any], hidden: int) -> int:
    """A product with the key and one with the value, over all query heads."""
    num_heads = int(config["num_attention_heads"])
    if config.get("kv_lora_rank"):
        dims = [int(config[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        return 2 * num_heads * sum(dims)
    return 4 * num_heads * int(config.get("head_dim") or hidden // num_heads)


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    num_layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return (None,) * num_layers
    kinds = config.get("layer_types") or ["sliding_attention"] * num_layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _experts(config: Mapping[str, Any], hidden: int, num_layers: int) -> Experts | None:
    num_experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
    if num_experts < 2 or not config.get("num_experts_per_tok"):
        return None
    num_dense_layers = int(config.get("first_k_dense_replace") or 0) + len(config.get("mlp_only_layers") or ())
    size = 3 * hidden * int(config.get("moe_intermediate_size") or config["intermediate_size"])
    return Experts(num_layers - num_dense_layers, num_experts, int(config["num_experts_per_tok"]), size)
