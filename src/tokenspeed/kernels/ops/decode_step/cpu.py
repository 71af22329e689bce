# SPDX-License-Identifier: Apache-2.0
"""A step as one call of the compiled CPU module (csrc/cpu/step.h), which runs the kernels of the other ops' cpu
solutions one after another: the same bits as those give, without a way through Python between them.

Knows how a model is described there. Does not know what is computed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.kernels.kv_pages import page_dim
from tokenspeed.kernels.ops.decode_step import (
    GELU_TANH,
    SILU,
    DecodeBatch,
    DecodeStep,
    DenseLayer,
    DenseModel,
    PackedWeight,
    Prepare,
)
from tokenspeed.kernels.platform import CPU_DTYPES, CPU_PAGE_DTYPES, compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, KernelContext, Reason, Solution

Int64Array = NDArray[np.int64]

_ACTIVATIONS = {SILU: 0, GELU_TANH: 1}
_ADDRESS, _COUNT, _FLOAT = np.uint64, np.int64, np.float32


def _record(*fields: tuple[str, type[np.generic] | np.dtype[np.void]]) -> np.dtype[np.void]:
    return np.dtype(list(fields))


_MATRIX = _record(
    ("weight", _ADDRESS),
    ("pieces", _ADDRESS),
    ("num_pieces", _COUNT),
    ("bias", _ADDRESS),
    ("num_outputs", _COUNT),
    ("num_inputs", _COUNT),
)
_PAGES = _record(("data", _ADDRESS), ("page_stride", _COUNT), ("slot_stride", _COUNT), ("head_stride", _COUNT))
_LAYER = _record(
    ("norm_before_attention", _ADDRESS),
    ("qkv", _MATRIX),
    ("q_norm", _ADDRESS),
    ("k_norm", _ADDRESS),
    ("rotary", _ADDRESS),
    ("rotary_dim", _COUNT),
    ("rotary_stride", _COUNT),
    ("is_interleaved", _COUNT),
    ("k", _PAGES),
    ("v", _PAGES),
    ("group", _COUNT),
    ("window", _COUNT),
    ("out", _MATRIX),
    ("norm_after_attention", _ADDRESS),
    ("norm_before_mlp", _ADDRESS),
    ("gate_up", _MATRIX),
    ("down", _MATRIX),
    ("norm_after_mlp", _ADDRESS),
)
_MODEL = _record(
    ("embed", _MATRIX),
    ("layers", _ADDRESS),
    ("num_layers", _COUNT),
    ("norm", _ADDRESS),
    ("head", _MATRIX),
    ("num_heads", _COUNT),
    ("num_kv_heads", _COUNT),
    ("head_dim", _COUNT),
    ("block_size", _COUNT),
    ("activation", _COUNT),
    ("dtype", _COUNT),
    ("page_dtype", _COUNT),
    ("eps", _FLOAT),
    ("weight_offset", _FLOAT),
    ("scale", _FLOAT),
    ("embed_scale", _FLOAT),
)
"""StepMatrix, StepPages, StepLayer and StepModel of csrc/cpu/step.h."""


class _Step:
    def __init__(self, model: DenseModel, max_rows: int) -> None:
        module = require_cpu_module()
        assert module.step_sizes() == (_MODEL.itemsize, _LAYER.itemsize), module.step_sizes()
        self._run, self._model, self._max_rows = module.decode_step, model, max_rows
        self._batch: DecodeBatch | None = None
        self._logits_RV: torch.Tensor | None = None
        self._vocab_size, self._num_groups = model.head.shape[0], 1 + max(layer.group for layer in model.layers)
        self._layers = np.array([_layer_record(layer) for layer in model.layers], dtype=_LAYER)
        self._described = np.array(_model_record(model, self._layers), dtype=_MODEL)
        for pages in (pages for layer in model.layers for pages in (layer.k_pages, layer.v_pages)):
            module.prefer_large_pages(pages.data_ptr(), pages.nbytes)

    def __call__(self, batch: DecodeBatch) -> torch.Tensor:
        if batch is not self._batch:
            self._take(batch)
        if self._logits_RV is None:
            self._logits_RV = torch.empty((len(batch.token_ids_R), self._vocab_size), dtype=torch.float32)
        self._run(*self._inputs, self._logits_RV.data_ptr(), 0, 0, 0, *self._sizes)
        return self._logits_RV

    def _take(self, batch: DecodeBatch) -> None:
        """Find where all of it lies."""
        num_rows, tables = len(batch.token_ids_R), batch.block_tables
        assert num_rows <= self._max_rows, (num_rows, self._max_rows)
        assert self._num_groups <= len(tables), (self._num_groups, len(tables))
        assert batch.token_ids_R.dtype is batch.positions_R.dtype is torch.int64, batch.token_ids_R.dtype
        assert batch.seq_lens_R.dtype is torch.int32, batch.seq_lens_R.dtype
        assert all(each.dtype is torch.int32 and each.stride(1) == 1 for each in tables), "block tables are int32"
        numbers = (batch.token_ids_R, batch.positions_R, batch.seq_lens_R)
        assert all(each.is_contiguous() for each in numbers), [each.stride() for each in numbers]
        self._tables = np.array([(each.data_ptr(), each.stride(0)) for each in tables], dtype=np.int64)
        addresses = [each.data_ptr() for each in numbers]
        described, tables_at = self._described.ctypes.data, self._tables.ctypes.data
        self._inputs, self._sizes = (described, *addresses, tables_at), (num_rows, len(tables))
        self._batch, self._logits_RV = batch, None


class _GreedyStep(_Step):
    def __init__(self, model: DenseModel, max_rows: int) -> None:
        super().__init__(model, max_rows)
        self.greedy_rows = min(max_rows, require_cpu_module().few_rows())
        self._told: Int64Array = np.zeros((2, self.greedy_rows), dtype=np.int64)
        self._is_faulty = np.zeros(self.greedy_rows, dtype=np.bool_)
        self._num_whole = np.zeros(1, dtype=np.int64)
        self._answers = [each.ctypes.data for each in (self._told, self._is_faulty, self._num_whole)]

    def most_likely(self, batch: DecodeBatch) -> Int64Array:
        assert len(batch.token_ids_R) <= self.greedy_rows, (len(batch.token_ids_R), self.greedy_rows)
        if batch is not self._batch:
            self._take(batch)
        self._run(*self._inputs, 0, *self._answers, *self._sizes)
        self._told[1] = self._is_faulty
        return self._told[:, : self._sizes[0]]


def _model_record(model: DenseModel, layers: NDArray[np.void]) -> tuple[object, ...]:
    return (
        _matrix_record(model.embed, None, model.packed.get("embed")),
        layers.ctypes.data,
        len(layers),
        model.norm.data_ptr(),
        _matrix_record(model.head, None, model.packed.get("head")),
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        model.layers[0].k_pages.shape[1],
        _ACTIVATIONS[model.activation],
        CPU_DTYPES[model.norm.dtype],
        CPU_PAGE_DTYPES[model.layers[0].k_pages.dtype],
        model.eps,
        model.weight_offset,
        model.scale,
        1.0 if model.embed_scale is None else model.embed_scale,
    )


def _layer_record(layer: DenseLayer) -> tuple[object, ...]:
    packed, table_PR = layer.packed, layer.table_PR
    return (
        layer.norm_before_attention.data_ptr(),
        _matrix_record(layer.qkv, layer.qkv_bias, packed.get("qkv")),
        _address(layer.q_norm),
        _address(layer.k_norm),
        _address(table_PR),
        0 if table_PR is None else table_PR.shape[1],
        0 if table_PR is None else table_PR.stride(0),
        int(layer.interleaved),
        (layer.k_pages.data_ptr(), *layer.k_pages.stride()[:3]),
        (layer.v_pages.data_ptr(), *layer.v_pages.stride()[:3]),
        layer.group,
        layer.window or 0,
        _matrix_record(layer.out, layer.out_bias, packed.get("out")),
        _address(layer.norm_after_attention),
        layer.norm_before_mlp.data_ptr(),
        _matrix_record(layer.gate_up, layer.gate_up_bias, packed.get("gate_up")),
        _matrix_record(layer.down, layer.down_bias, packed.get("down")),
        _address(layer.norm_after_mlp),
    )


def _matrix_record(weight: torch.Tensor, bias: torch.Tensor | None, packed: PackedWeight | None) -> tuple[int, ...]:
    num_outputs, num_inputs = weight.shape
    if packed is None:
        return weight.data_ptr(), 0, 0, _address(bias), num_outputs, num_inputs
    pieces_P3 = packed.cpu_pieces_P3
    assert pieces_P3 is not None, "refused"
    return 0, pieces_P3.data_ptr(), len(pieces_P3), _address(bias), num_outputs, num_inputs


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _refusal(model: DenseModel) -> str | None:
    """Why the module cannot run a model, None where it can."""
    if not model.layers:
        return "a model without layers"
    if model.activation not in _ACTIVATIONS:
        return f"the activation {model.activation}"
    if model.num_heads % model.num_kv_heads:
        return f"{model.num_heads} heads on {model.num_kv_heads} K/V heads"
    packed = [*model.packed.values(), *(each for layer in model.layers for each in layer.packed.values())]
    if any(each.cpu_pieces_P3 is None for each in packed):
        return "weights that stay packed in another way than the compiled kernels have them"
    dtype, page_dtype = model.norm.dtype, model.layers[0].k_pages.dtype
    if dtype not in CPU_DTYPES or page_dtype not in (dtype, torch.bfloat16, torch.int8):
        return f"pages of {page_dtype} for weights of {dtype}"
    for layer in model.layers:
        weights = (layer.norm_before_attention, layer.norm_before_mlp, layer.qkv)
        if any(each.dtype is not dtype for each in weights):
            return "weights of several dtypes"
        if layer.k_pages.dtype is not page_dtype or layer.v_pages.dtype is not page_dtype:
            return "pages of several dtypes"
        if layer.k_pages.shape[3] != page_dim(model.head_dim, page_dtype) or layer.v_pages.shape != layer.k_pages.shape:
            return f"pages of {tuple(layer.k_pages.shape)} for heads of {model.head_dim}"
        if layer.k_pages.stride(3) != 1 or layer.v_pages.stride(3) != 1:
            return "pages in which the numbers of a head do not lie together"
    return None


def _prepare(model: DenseModel, max_rows: int) -> DecodeStep | Reason:
    why_not = _refusal(model)
    if why_not is not None:
        return Reason(f"has no {why_not}")
    head = model.packed.get("head")
    return _GreedyStep(model, max_rows) if head is not None and head.in_planes else _Step(model, max_rows)


def _build(_ctx: KernelContext) -> Prepare:
    return _prepare


SOLUTION = Solution("cpu", Band.PERFORMANT, compiled_cpu, _build, batch_invariant=True)
