# SPDX-License-Identifier: Apache-2.0
"""The op decode_step in one call of the compiled CPU module: agrees with the reference on small models of many shapes,
with numbers and with weights that stay packed, and refuses in words what it cannot run."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drawn_dense import SHAPES, Drawn, Shape, agreement, solution
from tokenspeed.kernels.ops.decode_step import DenseModel, GreedyStep, PackedWeight
from tokenspeed.kernels.ops.packed_linear import Piece
from tokenspeed.kernels.platform import compiled_cpu
from tokenspeed.kernels.registry import KernelContext, Ok, Reason, bind

pytestmark = [
    pytest.mark.skipif(
        compiled_cpu(KernelContext("cpu", torch.float32)) != Ok(), reason="the compiled CPU kernels are not built"
    ),
    pytest.mark.usefixtures("cpu_isa"),
]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def packed(
    rows: int, columns: int, generator: torch.Generator, name: str = "cpu", *, is_head: bool = False
) -> PackedWeight:
    """Q8_0 blocks of small numbers."""
    blocks = torch.randint(0, 256, (rows, columns // 32, 34), generator=generator, dtype=torch.int64).to(torch.uint8)
    scale = torch.tensor([columns**-0.5 / 74], dtype=torch.float16)
    blocks[:, :, :2] = scale.view(torch.uint8)
    ctx = KernelContext("cpu", torch.float32, overrides={"packed_linear": name})
    return bind("packed_linear", ctx).call([Piece("q8_0", blocks.view(rows, -1))], is_head=is_head)  # type: ignore[no-any-return]


def with_packed(model: DenseModel, name: str) -> DenseModel:
    """The model with all matrices but `out` from blocks, the same ones for equal shapes of the model."""
    generator = torch.Generator().manual_seed(11)

    def drawn(weight: torch.Tensor, *, is_head: bool = False) -> PackedWeight:
        return packed(*weight.shape, generator, name, is_head=is_head)

    layers = [
        dataclasses.replace(layer, packed={part: drawn(getattr(layer, part)) for part in ("qkv", "gate_up", "down")})
        for layer in model.layers
    ]
    return dataclasses.replace(
        model, layers=tuple(layers), packed={"embed": drawn(model.embed), "head": drawn(model.head, is_head=True)}
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("positions", [[70], [0, 33, 69]], ids=["one-row", "rows"])
def test_it_agrees_with_the_reference(name: str, positions: list[int], dtype: torch.dtype) -> None:
    drawn = Drawn(SHAPES[name], dtype)
    agreement(solution("cpu", "cpu", dtype), drawn, positions, tolerance=TOLERANCES[dtype])


@pytest.mark.parametrize("name", SHAPES)
def test_pages_may_keep_bf16(name: str) -> None:
    drawn = Drawn(SHAPES[name], torch.float32, page_dtype=torch.bfloat16)
    agreement(solution("cpu", "cpu", torch.float32), drawn, [0, 33, 69], tolerance=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_pages_may_keep_codes(name: str, dtype: torch.dtype) -> None:
    drawn = Drawn(SHAPES[name], dtype, page_dtype=torch.int8)
    agreement(solution("cpu", "cpu", dtype), drawn, [0, 33, 69], tolerance=TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_branches_may_end_with_norms(name: str) -> None:
    shape = SHAPES["interleaved" if name == "gelu" else "qk-norm"]
    drawn = Drawn(dataclasses.replace(shape, closing_norms=True), torch.float32)
    agreement(solution("cpu", "cpu", torch.float32), drawn, [3, 40], tolerance=1e-5)


def test_matrices_may_stay_packed() -> None:
    """Activations become bytes, so the reference is not met closely, but much closer than by other blocks."""
    drawn = Drawn(Shape(hidden_size=64, ff_size=96, biases=True), torch.float32)
    model, batch = drawn.model(20), drawn.batch([5, 0, 60], 20)
    steps = [solution(name, "cpu", torch.float32)(with_packed(model, name), 3) for name in ("cpu", "reference")]
    logits = [step(batch) for step in steps if not isinstance(step, Reason)]
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 0.03


def test_a_batch_may_come_again_with_other_numbers() -> None:
    drawn = Drawn(Shape(hidden_size=64, ff_size=96), torch.float32)
    model = drawn.model(40)
    steps = [solution("cpu", "cpu", torch.float32)(model, 3) for _ in range(2)]
    again, anew = (step for step in steps if not isinstance(step, Reason))
    kept = drawn.batch([5, 0, 60], 40)
    for positions in ([5, 0, 60], [6, 1, 61], [11, 30, 59]):
        other = drawn.batch(positions, 40)
        pairs = zip(
            (kept.token_ids_R, kept.positions_R, kept.seq_lens_R, *kept.block_tables),
            (other.token_ids_R, other.positions_R, other.seq_lens_R, *other.block_tables),
            strict=True,
        )
        for ours, theirs in pairs:
            ours.copy_(theirs)
        assert torch.equal(again(kept), anew(other))
    fewer = drawn.batch([7, 8], 40)
    assert again(fewer).shape == (2, len(model.head))


def test_the_most_likely_token_is_the_one_that_the_logits_say() -> None:
    """Also where steps that want logits, of other batches, come between."""
    drawn = Drawn(Shape(hidden_size=64, ff_size=96), torch.float32)
    model = with_packed(drawn.model(40), "cpu")
    steps = [solution("cpu", "cpu", torch.float32)(model, 3) for _ in range(2)]
    step, other = (each for each in steps if isinstance(each, GreedyStep))
    batches = [drawn.batch(positions, 40) for positions in ([5, 0, 60], [7], [3, 30, 59], [41])]
    for batch in [each for each in batches * 3 if len(each.token_ids_R) <= step.greedy_rows]:
        expected = other(batch).argmax(1).tolist()
        for _ in range(2):
            assert step.most_likely(batch).tolist() == [expected, [0] * len(expected)]
        assert step(batch).argmax(1).tolist() == expected
        assert step.most_likely(batch).tolist()[0] == expected


def test_only_a_head_in_planes_makes_a_greedy_step() -> None:
    model = Drawn(Shape(hidden_size=64, ff_size=96), torch.float32).model(40)
    assert not isinstance(solution("cpu", "cpu", torch.float32)(model, 3), GreedyStep)
    head = packed(*model.head.shape, torch.Generator().manual_seed(0))
    other = dataclasses.replace(model, packed={"head": head})
    assert not isinstance(solution("cpu", "cpu", torch.float32)(other, 3), GreedyStep)


def test_rows_do_not_depend_on_each_other() -> None:
    drawn = Drawn(Shape(hidden_size=64, ff_size=96), torch.float32)
    model, batch = with_packed(drawn.model(40), "cpu"), drawn.batch([5, 0, 60, 17, 31, 2, 8], 40)
    step = solution("cpu", "cpu", torch.float32)(model, 7)
    assert not isinstance(step, Reason)
    together = step(batch)
    for row in range(7):
        one = slice(row, row + 1)
        alone = dataclasses.replace(
            batch,
            token_ids_R=batch.token_ids_R[one],
            positions_R=batch.positions_R[one],
            seq_lens_R=batch.seq_lens_R[one],
            block_tables=tuple(table[one] for table in batch.block_tables),
        )
        assert torch.equal(step(alone)[0], together[row])
    none = dataclasses.replace(alone, token_ids_R=batch.token_ids_R[:0])
    assert step(none).shape == (0, len(model.head))


def refused(model: DenseModel) -> str:
    answer = solution("cpu", "cpu", torch.float32)(model, 1)
    assert isinstance(answer, Reason)
    return answer.text


def test_what_it_cannot_run_it_refuses_in_words() -> None:
    model = Drawn(Shape(num_layers=1, hidden_size=64, ff_size=96), torch.float32).model(2)
    assert "relu_mul" in refused(dataclasses.replace(model, activation="relu_mul"))
    assert "without layers" in refused(dataclasses.replace(model, layers=()))
    assert "4 heads on 3" in refused(dataclasses.replace(model, num_kv_heads=3))
    assert "in another way" in refused(with_packed(model, "reference"))
    layer = model.layers[0]
    halves = dataclasses.replace(layer, k_pages=layer.k_pages.to(torch.float16))
    assert "pages of torch.float16" in refused(dataclasses.replace(model, layers=(halves,)))
    narrow = dataclasses.replace(layer, k_pages=layer.k_pages.to(torch.int8), v_pages=layer.v_pages.to(torch.int8))
    assert "for heads of 16" in refused(dataclasses.replace(model, layers=(narrow,)))
    mixed = dataclasses.replace(layer, k_pages=layer.k_pages.to(torch.bfloat16))
    assert "pages of several dtypes" in refused(dataclasses.replace(model, layers=(mixed,)))
    halves = dataclasses.replace(layer, qkv=layer.qkv.to(torch.bfloat16))
    assert "weights of several dtypes" in refused(dataclasses.replace(model, layers=(halves,)))
    across = dataclasses.replace(layer, v_pages=layer.v_pages.transpose(1, 3).contiguous().transpose(1, 3))
    assert "do not lie together" in refused(dataclasses.replace(model, layers=(across,)))
