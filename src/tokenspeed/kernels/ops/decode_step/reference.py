# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch: everything between the weights in float32, one row of attention at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as fn

from tokenspeed.kernels.kv_pages import from_codes, to_codes
from tokenspeed.kernels.ops.decode_step import GELU_TANH, DecodeBatch, DecodeStep, DenseLayer, DenseModel
from tokenspeed.kernels.registry import Band, Ok, Reason, Solution


def prepare(model: DenseModel, max_rows: int) -> DecodeStep | Reason:
    return _Step(model, max_rows)


class _Step:
    def __init__(self, model: DenseModel, max_rows: int) -> None:
        self._model, self._max_rows = model, max_rows

    def __call__(self, batch: DecodeBatch) -> torch.Tensor:
        model = self._model
        assert len(batch.token_ids_R) <= self._max_rows, (len(batch.token_ids_R), self._max_rows)
        embed = model.packed.get("embed")
        x_RD = (model.embed[batch.token_ids_R] if embed is None else embed.rows(batch.token_ids_R)).float()
        if model.embed_scale is not None:
            x_RD = x_RD * model.embed_scale
        for layer in model.layers:
            attended_RD = _attention(model, layer, _norm(model, x_RD, layer.norm_before_attention), batch)
            x_RD = x_RD + _closed(model, attended_RD, layer.norm_after_attention)
            fed_RD = _feed_forward(model, layer, _norm(model, x_RD, layer.norm_before_mlp))
            x_RD = x_RD + _closed(model, fed_RD, layer.norm_after_mlp)
        return _linear(model, "head", _norm(model, x_RD, model.norm), model.head, None)


def _norm(model: DenseModel, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + model.eps)
    return x * scale * (weight.float() + model.weight_offset)


def _closed(model: DenseModel, x_RD: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x_RD if weight is None else _norm(model, x_RD, weight)


def _linear(
    part: DenseModel | DenseLayer, name: str, x_RD: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    packed, bias = part.packed.get(name), None if bias is None else bias.float()
    return fn.linear(x_RD, weight.float(), bias) if packed is None else packed(x_RD, bias)


def _feed_forward(model: DenseModel, layer: DenseLayer, x_RD: torch.Tensor) -> torch.Tensor:
    gate_RF, up_RF = _linear(layer, "gate_up", x_RD, layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)
    gated_RF = fn.gelu(gate_RF, approximate="tanh") if model.activation == GELU_TANH else fn.silu(gate_RF)
    return _linear(layer, "down", gated_RF * up_RF, layer.down, layer.down_bias)


def _attention(model: DenseModel, layer: DenseLayer, x_RD: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
    num_heads, num_kv_heads = model.num_heads, model.num_kv_heads
    heads_RN = _linear(layer, "qkv", x_RD, layer.qkv, layer.qkv_bias)
    heads = heads_RN.view(len(x_RD), num_heads + 2 * num_kv_heads, model.head_dim)
    q_RHK, k_RGK, v_RGK = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q_RHK, k_RGK = _norm(model, q_RHK, layer.q_norm), _norm(model, k_RGK, layer.k_norm)
    if layer.table_PR is not None:
        turns_RR = layer.table_PR[batch.positions_R]
        q_RHK, k_RGK = (_turned(x, turns_RR, layer.interleaved) for x in (q_RHK, k_RGK))
    block_size = layer.k_pages.shape[1]
    outputs = []
    for row, position in enumerate(batch.positions_R.tolist()):
        table_B = batch.block_tables[layer.group][row]
        page, offset = int(table_B[position // block_size]), position % block_size
        layer.k_pages[page, offset] = _kept(k_RGK[row], layer.k_pages.dtype)
        layer.v_pages[page, offset] = _kept(v_RGK[row], layer.v_pages.dtype)
        outputs.append(_row_attention(model, layer, q_RHK[row], table_B, position))
    return _linear(layer, "out", torch.stack(outputs).flatten(1), layer.out, layer.out_bias)


def _kept(x_GK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return to_codes(x_GK) if dtype is torch.int8 else x_GK.to(dtype)


def _numbers(pages: torch.Tensor) -> torch.Tensor:
    return from_codes(pages) if pages.dtype is torch.int8 else pages.float()


def _turned(x_RHK: torch.Tensor, turns_RR: torch.Tensor, interleaved: bool) -> torch.Tensor:
    cos_R1, sin_R1 = turns_RR[:, None].chunk(2, dim=-1)
    rotary_dim = turns_RR.shape[1]
    pairs = (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
    if not interleaved:
        pairs = (slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim))
    turned = x_RHK.clone()
    first, second = x_RHK[..., pairs[0]], x_RHK[..., pairs[1]]
    turned[..., pairs[0]], turned[..., pairs[1]] = first * cos_R1 - second * sin_R1, second * cos_R1 + first * sin_R1
    return turned


def _row_attention(
    model: DenseModel, layer: DenseLayer, q_HK: torch.Tensor, table_B: torch.Tensor, position: int
) -> torch.Tensor:
    """(H, K) over the positions that the row's token sees, its own included."""
    block_size = layer.k_pages.shape[1]
    first = 0 if layer.window is None else max(0, position - layer.window + 1)
    places = torch.arange(first, position + 1, device=q_HK.device)
    pages, offsets = table_B[places // block_size].long(), places % block_size
    repeats = model.num_heads // model.num_kv_heads
    k_SHK = _numbers(layer.k_pages[pages, offsets]).repeat_interleave(repeats, dim=1)
    v_SHK = _numbers(layer.v_pages[pages, offsets]).repeat_interleave(repeats, dim=1)
    weights_HS = (torch.einsum("hk,shk->hs", q_HK, k_SHK) * model.scale).softmax(dim=-1)
    return torch.einsum("hs,shk->hk", weights_HS, v_SHK)


SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: prepare)
