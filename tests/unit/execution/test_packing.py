# SPDX-License-Identifier: Apache-2.0
"""Which matrices of a GGUF model stay packed, with which blocks, and that the model says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tiny_gguf import FF, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, Types, write_gguf
from tokenspeed.checkpoints import Weights, open_model
from tokenspeed.checkpoints.gguf import BLOCKS
from tokenspeed.core.config import ModelConfig
from tokenspeed.core.errors import CapacityError
from tokenspeed.execution import weights as loading
from tokenspeed.execution.packing import plan_packing
from tokenspeed.execution.weights import load_weights
from tokenspeed.kernels.ops.packed_linear import FORMATS
from tokenspeed.kernels.platform import compiled_cpu
from tokenspeed.kernels.registry import KernelContext, Ok
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.matrix import Matrix
from tokenspeed.models import resolve
from tokenspeed.spmd.mesh import GroupSizes, Mesh

SHAPED = ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

pytestmark = pytest.mark.skipif(
    not isinstance(compiled_cpu(KernelContext("cpu", torch.float32)), Ok), reason="the compiled kernels are not built"
)


def built(path: Path, ctx: BuildContext) -> tuple[Any, Weights]:
    """The model, not loaded yet."""
    source = open_model(ModelConfig(model=str(path)))
    return resolve(source.config).build(source.config, ctx), source.weights()


def context(num_ranks: int = 1, rank: int = 0, **options: Any) -> BuildContext:
    return BuildContext("cpu", options.pop("dtype", torch.float32), None, Mesh.of(GroupSizes.of(num_ranks)), rank)


def packed_names(model: Any) -> set[str]:
    return {name for name, each in model.named_modules() if isinstance(each, Matrix) and each.packed is not None}


def loaded(path: Path, ctx: BuildContext, *, packs: bool) -> Any:
    model, weights = built(path, ctx)
    load_weights(model, weights, path, None, plan_packing(model, weights, ctx) if packs else {})
    return model


def test_every_matrix_of_blocks_stays_packed(tmp_path: Path) -> None:
    """Also where a matrix is made of several formats; the head is the embedding's."""
    path = write_gguf(tmp_path / "a.gguf", {"attn_v": "Q8_0", "token_embd": "Q8_0", "ffn_down": "Q5_0"})
    exact, packed = (loaded(path, context(), packs=packs) for packs in (False, True))
    attention, mlp = "layers.0.attention", "layers.0.mlp"
    matrices = {"embed", f"{attention}.qkv", f"{attention}.out", f"{mlp}.gate_up", f"{mlp}.down"}
    assert packed_names(packed) == {f"{name}.matrix" for name in matrices}
    assert packed.head.matrix is packed.embed.matrix
    assert packed_names(exact) == set()
    x_TD = torch.randn(5, HIDDEN)
    for name in (f"{attention}.qkv", f"{mlp}.gate_up"):
        ours, theirs = packed.get_submodule(name)(x_TD), exact.get_submodule(name)(x_TD)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)
        assert not torch.equal(ours, theirs)
    ids_T = torch.tensor([3, 71, 0])
    torch.testing.assert_close(packed.embed(ids_T), exact.embed(ids_T), rtol=1e-6, atol=1e-7)


def test_formats_that_files_have_are_formats_that_stay_packed() -> None:
    """In as many bytes."""
    assert {name.lower(): shape for name, shape in BLOCKS.items() if shape[0] > 1} == FORMATS


def test_numbers_of_packed_matrices_take_no_memory(tmp_path: Path) -> None:
    model = loaded(write_gguf(tmp_path / "a.gguf", {}), context(), packs=True)
    weight = model.layers[0].mlp.gate_up.weight
    assert tuple(weight.shape) == (2 * FF, HIDDEN)
    assert weight.untyped_storage().nbytes() == 0
    assert model.layers[0].mlp.gate_up.matrix.packed.num_bytes == 2 * FF * HIDDEN // 32 * 20


def test_what_is_partly_numbers_becomes_numbers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"attn_v": "F16", "ffn_down": "F32"})
    exact, packed = (loaded(path, context(), packs=packs) for packs in (False, True))
    names = packed_names(packed)
    assert "layers.0.attention.qkv.matrix" not in names
    assert "layers.0.mlp.down.matrix" not in names
    assert "layers.0.mlp.gate_up.matrix" in names
    for part in ("attention.qkv", "mlp.down"):
        ours, theirs = (each.get_submodule(f"layers.0.{part}").weight for each in (packed, exact))
        assert torch.equal(ours, theirs)


def test_ranks_take_their_blocks(tmp_path: Path) -> None:
    """Rows, and columns where these are whole blocks: of 192 inputs each of two ranks has three blocks."""
    path = write_gguf(tmp_path / "a.gguf", {"token_embd": "Q8_0"})
    whole = loaded(path, context(), packs=True)
    ranks = [loaded(path, context(2, rank), packs=True) for rank in range(2)]
    assert all(packed_names(model) == packed_names(whole) for model in ranks)
    x_TD, inner_TF = torch.randn(3, HIDDEN), torch.randn(3, FF)
    down = sum(model.layers[0].mlp.down(part) for model, part in zip(ranks, inner_TF.chunk(2, dim=1), strict=True))
    torch.testing.assert_close(down, whole.layers[0].mlp.down(inner_TF), rtol=1e-5, atol=1e-5)
    gate, up = whole.layers[0].mlp.gate_up(x_TD).chunk(2, dim=1)
    parts = [model.layers[0].mlp.gate_up(x_TD).chunk(2, dim=1) for model in ranks]
    assert torch.equal(torch.cat([part[0] for part in parts], dim=1), gate)
    assert torch.equal(torch.cat([part[1] for part in parts], dim=1), up)
    ids_T = torch.arange(VOCAB)
    assert torch.equal(sum(model.embed(ids_T) for model in ranks), whole.embed(ids_T))


def test_parts_that_cut_a_block_become_numbers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {})
    model = loaded(path, context(4), packs=True)  # 192 / 4 inputs are one block and a half
    assert "layers.0.mlp.down.matrix" not in packed_names(model)
    assert "layers.0.attention.out.matrix" in packed_names(model)


def test_nothing_is_packed_where_no_kernel_multiplies_blocks(tmp_path: Path) -> None:
    ctx = context(dtype=torch.float16)
    model, weights = built(write_gguf(tmp_path / "a.gguf", {}), ctx)
    assert not plan_packing(model, weights, ctx)
    assert "packed_linear" not in ctx.bindings


def test_memory_is_asked_for_what_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, path = context(), write_gguf(tmp_path / "a.gguf", {})
    model, weights = built(path, ctx)
    packing = plan_packing(model, weights, ctx)
    blocks = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2) // 32 * 20
    needed = blocks + 3 * HIDDEN * 4
    monkeypatch.setattr(loading, "available_memory_bytes", lambda device: needed)
    loading.require_memory(model, path, torch.device("cpu"), packing)
    with pytest.raises(CapacityError):
        loading.require_memory(model, path, torch.device("cpu"))
    monkeypatch.setattr(loading, "available_memory_bytes", lambda device: needed - 1)
    with pytest.raises(CapacityError):
        loading.require_memory(model, path, torch.device("cpu"), packing)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_on_a_cpu_packs_what_it_can_unless_told_otherwise(
    tmp_path: Path, tools: Any, dtype: str, deterministic: bool
) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"token_embd": "Q8_0", "ffn_down": "F32"})
    infos = {}
    for form in ("auto", "packed", "exact"):
        config = tools.engine_config(path, weights=form, dtype=dtype)
        device = msgspec.structs.replace(config.device, deterministic=deterministic)
        runner = tools.new_runner(msgspec.structs.replace(config, device=device))
        runner.close()
        infos[form] = runner.info
    itemsize = 2 if dtype == "bfloat16" else 4
    num_packed_bytes = VOCAB * HIDDEN // 32 * 34 + (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM * HIDDEN // 32 * 20
    num_packed_bytes += 2 * FF * HIDDEN // 32 * 20
    num_bytes = num_packed_bytes + (FF * HIDDEN + 3 * HIDDEN) * itemsize
    for form in ("auto", "packed"):
        assert (infos[form].weight_bytes, infos[form].packed_bytes) == (num_bytes, num_packed_bytes)
        assert "packed_linear" in {kernel.op for kernel in infos[form].kernels}
    exact = infos["exact"]
    assert (exact.weight_bytes, exact.packed_bytes) == (exact.num_parameters * itemsize, 0)
    assert "packed_linear" not in {kernel.op for kernel in exact.kernels}


@pytest.mark.parametrize(
    ("types", "form", "expected"),
    [
        ({}, "auto", torch.bfloat16),
        ({}, "exact", torch.float32),
        (dict.fromkeys(SHAPED, "F16"), "auto", torch.float32),
    ],
    ids=["packed", "exact", "nothing-in-blocks"],
)
def test_pages_keep_two_bytes_where_weights_stay_packed(
    tmp_path: Path, tools: Any, types: Types, form: str, expected: torch.dtype
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", types)
    runner = tools.new_runner(tools.engine_config(path, weights=form))
    pages = [tensor for layer in runner._buffers.kv_layers for tensor in layer.tensors]
    assert {tensor.dtype for tensor in pages} == {expected}
    assert runner.info.kv_bytes == sum(tensor.nbytes for tensor in pages)
    assert runner._host_step is not None
    runner.close()


def test_a_row_does_not_depend_on_its_batch(tmp_path: Path, tools: Any) -> None:
    """The same tokens and log-probabilities alone and among others."""
    path = write_gguf(tmp_path / "a.gguf", {"token_embd": "Q8_0"})
    loop = tools.Loop(tools.engine_config(path))
    try:
        assert "packed_linear" in {kernel.op for kernel in loop.runner.info.kernels}
        wishes = [tools.Wish([(7 * row + 3 * place) % VOCAB for place in range(9 + row)], 6) for row in range(6)]
        together = [request.token_ids for request in loop.run(wishes)]
        assert [loop.run([wish])[0].token_ids for wish in wishes] == together
    finally:
        loop.close()
