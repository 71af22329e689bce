# SPDX-License-Identifier: Apache-2.0
"""A decode step of one row as one kernel that stays on the device from the embedding to the logits.

Knows the kernel's constants, parameters and scratch memory, and which models it can run. Does not know how device code
is compiled or launched. The device code is in _persistent*.cu*.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from tokenspeed.kernels.ops.decode_step import GELU_TANH, SILU, DecodeBatch, DenseLayer, DenseModel

NUM_THREADS = 288
_NO_WINDOW = 1 << 40
_SLOTS = (24576, 28672, 20480, 32768, 16384, 12288, 8192)  # bytes, the preferred first
_IN_FLIGHT = 49152  # bytes of a block, measured best: more wait in line before the memory
_SPLITS_MAX, _MERGED_MAX = 64, 32768  # blocks that share a K/V head, and numbers that one of them adds up
_MAP_BYTES = 128
_FILES = ("_persistent_ptx.cuh", "_persistent_products.cuh", "_persistent.cu")

Launch = Callable[[int, int, ctypes.Structure], None]
"""(blocks, threads of a block, parameters), on torch's current stream."""
TokenMap = Callable[[torch.Tensor, int], bytes]
"""(pages, tokens copied at once) -> what the device needs to copy them."""


@dataclass(frozen=True, slots=True)
class Constants:
    """What the device code is compiled for; see _persistent_products.cuh. slot, memory: bytes."""

    hidden: int
    ff: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    num_groups: int
    block_size: int
    gelu: int
    num_blocks: int
    splits: int
    slot: int
    memory: int

    def macros(self) -> dict[str, int]:
        return {field.name.upper(): getattr(self, field.name) for field in fields(self)}

    @property
    def unit_tokens(self) -> int:
        """Tokens that are copied at once."""
        tokens = 64
        while self.block_size % tokens or tokens * self.head_dim * 2 > self.slot:
            tokens //= 2
        return tokens


def device_code() -> list[str]:
    """The device code's files; the first of them is all that knows the machine."""
    return [Path(__file__).with_name(name).read_text() for name in _FILES]


def source() -> str:
    """The device code, a single text."""
    return "\n".join(device_code())


def constants_of(model: DenseModel, num_blocks: int, memory: int, slot: int | None = None) -> Constants:
    """For a device of so many processors with so many bytes of shared memory each."""
    layer = model.layers[0]
    hidden, ff, heads = layer.qkv.shape[1], layer.down.shape[1], layer.out.shape[1]
    head_numbers = model.num_heads // model.num_kv_heads * model.head_dim
    sizes = ((len(layer.qkv) * hidden, hidden), (hidden * heads, heads), (2 * ff * hidden, hidden), (hidden * ff, ff))

    def waste(bytes_of_slot: int) -> float:
        return sum(count * (1 - _filled(inputs * 2, bytes_of_slot)) for count, inputs in sizes)

    return Constants(
        hidden=hidden,
        ff=ff,
        vocab=len(model.head),
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_layers=len(model.layers),
        num_groups=1 + max(each.group for each in model.layers),
        block_size=layer.k_pages.shape[1],
        gelu=int(model.activation == GELU_TANH),
        num_blocks=num_blocks,
        splits=max(1, min(num_blocks // model.num_kv_heads, _SPLITS_MAX, _MERGED_MAX // head_numbers)),
        slot=slot or min(_SLOTS, key=waste),
        memory=memory,
    )


def _filled(row_bytes: int, slot: int) -> float:
    """Which part of a slot a product's rows fill."""
    if row_bytes <= slot:
        return min(8, slot // row_bytes) * row_bytes / slot
    return row_bytes / (-(-row_bytes // slot) * slot)


def refusal(model: DenseModel, num_blocks: int) -> str | None:
    """Why the kernel cannot run a model, None where it can. num_blocks: processors of the device."""
    if not model.layers:
        return "a model without layers"
    if model.activation not in (SILU, GELU_TANH):
        return f"the activation {model.activation}"
    if model.embed.dtype is not torch.bfloat16:
        return f"weights of {model.embed.dtype}, where it knows bfloat16"
    if model.head_dim not in (64, 128, 256):
        return f"heads of {model.head_dim} numbers, which is not 64, 128 or 256"
    if model.num_heads % model.num_kv_heads or model.num_heads // model.num_kv_heads > 16:
        return f"{model.num_heads} heads on {model.num_kv_heads} K/V heads"
    if model.num_kv_heads > num_blocks:
        return f"{model.num_kv_heads} K/V heads, more than the {num_blocks} processors"
    if len(model.layers) > 128:
        return f"{len(model.layers)} layers, where 128 are the most"
    for layer in model.layers:
        why_not = _layer_refusal(model, layer)
        if why_not is not None:
            return why_not
    return _weight_refusal(model.embed, model) or _weight_refusal(model.head, model)


def _layer_refusal(model: DenseModel, layer: DenseLayer) -> str | None:
    first, pages = model.layers[0], layer.k_pages
    block_size = pages.shape[1]
    if block_size != first.k_pages.shape[1] or block_size % 16:
        return f"pages of {block_size} tokens, which are not all alike or not a multiple of 16"
    page_stride, token_stride, head_stride, last_stride = pages.stride()
    if pages.dtype is not model.embed.dtype:
        return f"pages of {pages.dtype} beside weights of {model.embed.dtype}"
    if layer.v_pages.stride() != pages.stride() or last_stride != 1:
        return "pages of K and V that lie differently"
    if not token_stride <= head_stride <= page_stride or any(step % 8 for step in pages.stride()[:3]):
        return "pages in which a head's tokens do not lie together"
    if layer.table_PR is not None and layer.table_PR.shape[1] > model.head_dim:
        return f"a rotation of {layer.table_PR.shape[1]} numbers in heads of {model.head_dim}"
    for each in (layer.qkv, layer.out, layer.gate_up, layer.down):
        why_not = _weight_refusal(each, model)
        if why_not is not None:
            return why_not
    if any(ours.shape != theirs.shape for ours, theirs in zip(_matrices(layer), _matrices(first), strict=True)):
        return "layers of several sizes"
    return None


def _matrices(layer: DenseLayer) -> tuple[torch.Tensor, ...]:
    return layer.qkv, layer.out, layer.gate_up, layer.down


def _weight_refusal(weight: torch.Tensor, model: DenseModel) -> str | None:
    if weight.dtype is not model.embed.dtype or not weight.is_contiguous() or weight.data_ptr() % 16:
        return "weights of several dtypes, or not contiguous"
    if weight.shape[1] % 16 or weight.shape[1] > 1 << 15:
        return f"a matrix of {weight.shape[0]} x {weight.shape[1]}, whose rows are not a multiple of 16 below 32,768"
    return None


class PersistentStep:
    """A DecodeStep of one row."""

    def __init__(self, model: DenseModel, constants: Constants, launch: Launch, token_map: TokenMap) -> None:
        self._model, self._constants, self._launch = model, constants, launch
        device, c = model.embed.device, constants

        def scratch(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        heads = [pages for layer in model.layers for pages in (layer.k_pages, layer.v_pages)]
        maps = bytearray(b"".join(token_map(pages, c.unit_tokens).ljust(_MAP_BYTES, b"\0") for pages in heads))
        self._maps = torch.frombuffer(maps, dtype=torch.uint8).to(device)
        rows = [self._layer_row(index, layer) for index, layer in enumerate(model.layers)]
        self._layers = torch.tensor(rows, dtype=torch.int64).to(device)
        heads_size, group = c.num_heads * c.head_dim, c.num_heads // c.num_kv_heads
        self._scratch = {
            "stream": scratch(c.hidden),
            "qkv": scratch(heads_size + 2 * c.num_kv_heads * c.head_dim),
            "parts": scratch(c.splits * heads_size),
            "stats": scratch(c.splits * c.num_kv_heads * group * 2),
            "attended": scratch(heads_size, model.embed.dtype),
            "gated": scratch(c.ff, model.embed.dtype),
            "counters": scratch(96 + 16 * c.num_kv_heads, torch.int32),
        }
        self._params = _params_type(c.num_groups)()
        pointers = self._scratch | {
            "layers": self._layers, "embed": model.embed, "norm": model.norm, "head": model.head,
        }  # fmt: skip
        for name, tensor in pointers.items():
            setattr(self._params, name, tensor.data_ptr())
        self._params.embed_scale = 1.0 if model.embed_scale is None else model.embed_scale
        self._params.eps, self._params.gain_offset = model.eps, model.weight_offset
        self._params.score_scale = model.scale
        unit_bytes = c.unit_tokens * c.head_dim * model.embed.itemsize
        self.in_flight(*[max(2, _IN_FLIGHT // size) for size in (c.slot, unit_bytes)])

    def in_flight(self, weights: int, pages: int) -> None:
        """Slots of each block that may be on their way at once."""
        self._params.weights_in_flight, self._params.pages_in_flight = weights, pages

    def __call__(self, batch: DecodeBatch) -> torch.Tensor:
        assert len(batch.token_ids_R) == 1, len(batch.token_ids_R)
        logits_RV = torch.empty(1, self._constants.vocab, dtype=torch.float32, device=self._model.embed.device)
        params = self._params
        params.token_id, params.position = batch.token_ids_R.data_ptr(), batch.positions_R.data_ptr()
        params.logits = logits_RV.data_ptr()
        for group in range(self._constants.num_groups):
            params.tables[group] = batch.block_tables[group].data_ptr()
        self._launch(self._constants.num_blocks, NUM_THREADS, params)
        return logits_RV

    def _layer_row(self, index: int, layer: DenseLayer) -> list[int]:
        """In the order of the device's struct Layer."""
        page_stride, token_stride, head_stride, _ = layer.k_pages.stride()
        first_map = self._maps.data_ptr() + 2 * index * _MAP_BYTES
        has_norm = layer.q_norm is not None and layer.k_norm is not None
        tensors = (
            layer.norm_before_attention, layer.qkv, layer.qkv_bias, layer.q_norm if has_norm else None,
            layer.k_norm if has_norm else None, layer.out, layer.out_bias, layer.norm_before_mlp, layer.gate_up,
            layer.gate_up_bias, layer.down, layer.down_bias,
        )  # fmt: skip
        return [
            *[0 if tensor is None else tensor.data_ptr() for tensor in tensors],
            first_map,
            first_map + _MAP_BYTES,
            layer.k_pages.data_ptr(),
            layer.v_pages.data_ptr(),
            0 if layer.table_PR is None else layer.table_PR.data_ptr(),
            0 if layer.table_PR is None else layer.table_PR.shape[1],
            int(layer.interleaved),
            layer.group,
            layer.window or _NO_WINDOW,
            page_stride,
            token_stride,
            head_stride,
        ]


def _params_type(num_groups: int) -> type[ctypes.Structure]:
    """The device's struct Params."""
    pointers = (
        "layers", "embed", "norm", "head", "token_id", "position", "stream", "qkv", "parts", "stats", "logits",
        "attended", "gated", "counters",
    )  # fmt: skip
    floats, numbers = ["embed_scale", "eps", "gain_offset", "score_scale"], ["weights_in_flight", "pages_in_flight"]
    members: list[tuple[str, type]] = [(name, ctypes.c_uint64) for name in pointers]
    members += [(name, ctypes.c_float) for name in floats]
    members += [(name, ctypes.c_int) for name in numbers]
    members.append(("tables", ctypes.c_uint64 * num_groups))
    return type("Params", (ctypes.Structure,), {"_fields_": members})
