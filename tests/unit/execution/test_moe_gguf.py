# SPDX-License-Identifier: Apache-2.0
"""GGUF files of models with experts: what transformers says of them, and experts that stay in the blocks of their
file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from drawn_moe import ARCHITECTURES, CHOSEN, EXPERTS, FF, FORMATS, HIDDEN, LAYERS, VOCAB, write_moe
from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import ModelConfig
from tokenspeed.execution.packing import plan_packing
from tokenspeed.execution.weights import load_weights
from tokenspeed.kernels.ops.packed_linear import FORMATS as BLOCKS
from tokenspeed.kernels.platform import compiled_cpu
from tokenspeed.kernels.registry import KernelContext, Ok
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.matrix import MatrixStack
from tokenspeed.layers.moe import Experts, Routing
from tokenspeed.models import resolve
from tokenspeed.spmd.mesh import GroupSizes, Mesh

PROMPTS = [[(7 * row + 3 * place) % VOCAB for place in range(5 + 4 * row)] for row in range(4)]
NUM_TOKENS = 12
TIE = 1e-3
IS_BUILT = isinstance(compiled_cpu(KernelContext("cpu", torch.float32)), Ok)

each_family = pytest.mark.parametrize("family", ARCHITECTURES)
needs_kernels = pytest.mark.skipif(not IS_BUILT, reason="the compiled kernels are not built")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch.inference_mode():
        yield


def answers(tools: Any, path: Path, **options: Any) -> tuple[list[list[int]], Any]:
    loop = tools.Loop(tools.engine_config(path, **options))
    try:
        requests = loop.run([tools.Wish(each, NUM_TOKENS) for each in PROMPTS])
        return [each.token_ids for each in requests], loop.runner.info
    finally:
        loop.close()


@pytest.mark.parametrize("form", ["q8_0", "q4_k"])
@each_family
def test_exact_weights_say_what_transformers_says(tmp_path: Path, tools: Any, family: str, form: str) -> None:
    oracle = write_moe(tmp_path / "a.gguf", family, form)
    given, info = answers(tools, tmp_path / "a.gguf", weights="exact")
    assert info.packed_bytes == 0
    for prompt, answer in zip(PROMPTS, given, strict=True):
        logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best, best_ids = logits.topk(2, dim=-1)
        for index, token in enumerate(answer):
            assert token == best_ids[index, 0] or best[index, 0] - best[index, 1] < TIE, (prompt, index)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_transformers_reads_the_same_from_the_file(tmp_path: Path, family: str) -> None:
    """So it is such a file as others write. It does not look for the width of experts there, and reads neither a
    layer without experts nor Mixtral."""
    path = tmp_path / "a.gguf"
    oracle = write_moe(path, family, "q8_0")
    read = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=path.name, dtype=torch.float32, config=oracle.config
    ).state_dict()
    expected = oracle.state_dict()
    assert set(read) == set(expected)
    differing = {name for name, values in read.items() if not torch.equal(values, expected[name])}
    assert differing == {name for name in expected if "layers.0.mlp" in name and family == "qwen3_moe"}


def loaded(path: Path, *, packs: bool, sizes: GroupSizes | None = None, rank: int = 0) -> tuple[Any, BuildContext]:
    source = open_model(ModelConfig(model=str(path)))
    ctx = BuildContext("cpu", torch.float32, None, Mesh.of(sizes or GroupSizes()), rank)
    model: Any = resolve(source.config).build(source.config, ctx)
    weights = source.weights()
    load_weights(model, weights, path, None, plan_packing(model, weights, ctx) if packs else {})
    return model, ctx


def experts_of(model: Any) -> list[Experts]:
    return [each for each in model.modules() if isinstance(each, Experts)]


@needs_kernels
@pytest.mark.parametrize("form", FORMATS)
def test_experts_stay_in_the_blocks_of_the_file(tmp_path: Path, form: str) -> None:
    write_moe(tmp_path / "a.gguf", "qwen2_moe", form)
    packed, ctx = loaded(tmp_path / "a.gguf", packs=True)
    exact, _ = loaded(tmp_path / "a.gguf", packs=False)
    num_inputs, num_bytes = BLOCKS[form]
    stacks = [each for each in packed.modules() if isinstance(each, MatrixStack)]
    assert len(stacks) == 2 * LAYERS
    for stack in stacks:
        assert stack.packed is not None
        assert stack.weight.untyped_storage().nbytes() == 0
        assert sum(each.num_bytes for each in stack.packed) == stack.weight.numel() // num_inputs * num_bytes
    assert ctx.bindings["moe_experts"].solution == "cpu"
    for num_tokens in (1, 40):
        x_TD = torch.randn(num_tokens, HIDDEN)
        routing = Routing(torch.rand(num_tokens, EXPERTS).topk(CHOSEN).indices, torch.rand(num_tokens, CHOSEN))
        ours_TD, theirs_TD = (experts_of(model)[0](x_TD, routing) for model in (packed, exact))
        assert 0 < float((ours_TD - theirs_TD).norm() / theirs_TD.norm()) < 0.02


@needs_kernels
@each_family
def test_an_engine_packs_experts_and_says_nearly_the_same(tmp_path: Path, tools: Any, family: str) -> None:
    oracle = write_moe(tmp_path / "a.gguf", family, "q6_k")
    given, info = answers(tools, tmp_path / "a.gguf", weights="packed")
    num_matrix_weights = sum(
        values.numel() for name, values in oracle.state_dict().items() if values.ndim > 1 and ".gate.w" not in name
    )
    num_matrix_weights -= sum(values.numel() for name, values in oracle.state_dict().items() if "expert_gate" in name)
    assert info.packed_bytes == num_matrix_weights // 256 * 210
    assert {"moe_experts", "packed_linear"} <= {kernel.op for kernel in info.kernels}
    agreed = 0
    for prompt, answer in zip(PROMPTS, given, strict=True):
        logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        agreed += int((logits.argmax(dim=-1) == torch.tensor(answer)).sum())
    # Where two experts are about as good, rounding may choose the other one, which with random weights says something
    # else altogether.
    assert agreed >= 0.75 * NUM_TOKENS * len(PROMPTS)


@needs_kernels
def test_a_row_does_not_depend_on_its_batch(tmp_path: Path, tools: Any) -> None:
    write_moe(tmp_path / "a.gguf", "qwen3_moe", "q4_0")
    loop = tools.Loop(tools.engine_config(tmp_path / "a.gguf"))
    try:
        together = [request.token_ids for request in loop.run([tools.Wish(each, NUM_TOKENS) for each in PROMPTS])]
        assert [loop.run([tools.Wish(each, NUM_TOKENS)])[0].token_ids for each in PROMPTS] == together
    finally:
        loop.close()


@needs_kernels
@pytest.mark.parametrize(("ep", "moe_tp"), [(2, 1), (1, 2)])
def test_ranks_take_their_experts_or_their_blocks_of_each(tmp_path: Path, ep: int, moe_tp: int) -> None:
    write_moe(tmp_path / "a.gguf", "mixtral", "q8_0")
    whole, _ = loaded(tmp_path / "a.gguf", packs=True)
    sizes = GroupSizes.of(2, ep=ep, moe_tp=moe_tp)
    ranks = [loaded(tmp_path / "a.gguf", packs=True, sizes=sizes, rank=rank)[0] for rank in range(2)]
    stacks = [experts_of(model)[1] for model in ranks]
    assert all(each.gate_up.packed is not None and each.down.packed is not None for each in stacks)
    assert [len(each.gate_up.packed or ()) for each in stacks] == [EXPERTS // ep] * 2
    assert {each.local_ff_size for each in stacks} == {FF // moe_tp}
    x_TD = torch.randn(9, HIDDEN)
    routing = Routing(torch.rand(9, EXPERTS).topk(CHOSEN).indices, torch.rand(9, CHOSEN))
    ours_TD, theirs_TD = sum(each(x_TD, routing) for each in stacks), experts_of(whole)[1](x_TD, routing)
    # A part of a row may keep other inputs apart than the whole.
    assert float((ours_TD - theirs_TD).norm() / theirs_TD.norm()) < (1e-6 if moe_tp == 1 else 0.01)
