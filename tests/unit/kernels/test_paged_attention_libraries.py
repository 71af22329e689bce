# SPDX-License-Identifier: Apache-2.0
"""Solutions of attention by optional libraries: what a library is asked, which calls it never sees, and the words of a
refusal. The libraries are stood in for by modules that record a call and answer it as the oracle would."""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tokenspeed.kernels.ops.paged_attention import SINKS, _library, flash_attn, flashinfer, gluon, triton
from tokenspeed.kernels.ops.paged_attention.reference import paged_attention as reference
from tokenspeed.kernels.registry import KernelContext, Ok, Reason

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter attends short rows here")

BLOCK, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 64
ROWS = ((1, 50), (70, 101), (0, 0), (9, 48), (8, 8), (1, 0))
"""(query_len, seq_len): more than 8 queries are long here."""
PADDING = 3
SOLUTIONS = (flash_attn.SOLUTION, flashinfer.SOLUTION)


class FakeFlashAttention(types.ModuleType):
    """flash_attn.cute, with answers only for what seqused_q has of a row, NaN elsewhere."""

    def __init__(self) -> None:
        super().__init__("flash_attn.cute")
        self.calls: list[dict[str, Any]] = []

    def flash_attn_varlen_func(self, q: Any, k: Any, v: Any, **keywords: Any) -> tuple[torch.Tensor, None]:
        self.calls.append({"q": q, "k": k, "v": v, **keywords})
        out_THK = torch.full(q.shape, math.nan, dtype=q.dtype)
        starts = keywords["cu_seqlens_q"].tolist()
        for row, used in enumerate(keywords["seqused_q"].tolist()):
            tokens = slice(starts[row], starts[row] + used)
            if used:
                out_THK[tokens] = reference(
                    q[tokens].float(),
                    k,
                    v,
                    query_start=torch.tensor([0, used]),
                    seq_lens_R=keywords["seqused_k"][row : row + 1],
                    block_tables_RB=keywords["page_table"][row : row + 1],
                    scale=keywords["softmax_scale"],
                    window=None,
                    soft_cap=keywords["softcap"] or None,
                    sinks_H=keywords["learnable_sink"],
                ).to(q.dtype)
        return out_THK, None


class FakeFlashInfer(types.ModuleType):
    """flashinfer, whose one wrapper answers what was planned."""

    def __init__(self) -> None:
        super().__init__("flashinfer")
        self.made: list[tuple[torch.Tensor, str, str]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.keywords: dict[str, Any] = {}

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: Any, kv_layout: str, *, backend: str) -> Any:
        self.made.append((workspace, kv_layout, backend))
        return self

    def plan(self, *args: Any, **keywords: Any) -> None:
        self.calls.append(args)
        self.keywords = keywords

    def run(self, q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> torch.Tensor:
        starts, page_starts, pages, last_lengths = self.calls[-1][:4]
        assert len(q) == len(out) == starts[-1]
        counts = page_starts.diff()
        tables_RB = torch.nn.utils.rnn.pad_sequence(pages.split(counts.tolist()), batch_first=True)
        seq_lens_R = (counts - 1) * pools[0].shape[2] + last_lengths
        for row, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
            if last - first > seq_lens_R[row]:
                out[first:last] = math.nan
            elif first < last:
                out[first:last] = reference(
                    q[first:last].float(),
                    *(pool.transpose(1, 2) for pool in pools),
                    query_start=torch.tensor([0, last - first]),
                    seq_lens_R=seq_lens_R[row : row + 1],
                    block_tables_RB=tables_RB[row : row + 1],
                    scale=self.keywords["sm_scale"],
                    window=None,
                    soft_cap=self.keywords["logits_soft_cap"] or None,
                ).to(q.dtype)
        return out


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    cute, library = FakeFlashAttention(), FakeFlashInfer()
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    return {"flash_attn": cute, "flashinfer": library}


def drawn(rows: Sequence[tuple[int, int]] = ROWS, head_dim: int = HEAD_DIM) -> tuple[Any, dict[str, Any]]:
    """A call in bfloat16 whose pages hold NaN, and whose tables lead nowhere, wherever no row has a token."""
    torch.manual_seed(0)
    blocks = [-(-seq_len // BLOCK) for _, seq_len in rows]
    pools = torch.full((2, sum(blocks) + 2, KV_HEADS, BLOCK, head_dim), math.nan, dtype=torch.bfloat16)
    tables_RB = torch.full((len(rows), max(blocks) + 1), 2**31 - 1, dtype=torch.int32)
    free = torch.randperm(sum(blocks)) + 1
    for row, (_, seq_len) in enumerate(rows):
        own, free = free[: blocks[row]], free[blocks[row] :]
        tables_RB[row, : blocks[row]] = own
        for position in range(seq_len):
            pools[:, own[position // BLOCK], :, position % BLOCK] = torch.randn(2, KV_HEADS, head_dim).bfloat16()
    starts = [0, *itertools.accumulate(query_len for query_len, _ in rows)]
    fused = torch.randn(starts[-1] + PADDING, HEADS + 2, head_dim).bfloat16()
    keywords = {
        "query_start": torch.tensor(starts, dtype=torch.int32),
        "seq_lens_R": torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32),
        "block_tables_RB": tables_RB,
        "scale": 0.1,
        "window": None,
        "soft_cap": None,
        "max_query_len": max(query_len for query_len, _ in rows),
    }
    return (fused[:, :HEADS], *pools.transpose(2, 3).unbind()), keywords


def built(solution: Any) -> Any:
    return solution.build(KernelContext("cpu", torch.bfloat16))


def assert_agrees(actual: torch.Tensor, args: Any, keywords: dict[str, Any]) -> None:
    expected = reference(args[0].float(), *args[1:], **keywords)
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda each: each.name)
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_answers_of_the_library_and_of_short_rows_come_together(
    solution: Any, soft_cap: float | None, fakes: dict[str, Any]
) -> None:
    args, keywords = drawn()
    keywords["soft_cap"] = soft_cap
    actual = built(solution)(*args, **keywords)
    assert len(fakes[solution.name].calls) == 1
    assert_agrees(actual, args, keywords)
    assert not actual[-PADDING:].any()


def test_flash_attn_is_asked_in_its_terms(fakes: dict[str, Any]) -> None:
    args, keywords = drawn()
    keywords |= {"soft_cap": 30.0, "sinks_H": torch.randn(HEADS)}
    actual = built(flash_attn.SOLUTION)(*args, **keywords)
    (call,) = fakes["flash_attn"].calls
    assert [call[name] is tensor for name, tensor in zip("qkv", args, strict=True)] == [True] * 3
    assert call["cu_seqlens_q"] is keywords["query_start"]
    assert call["seqused_k"] is keywords["seq_lens_R"]
    assert call["page_table"] is keywords["block_tables_RB"]
    assert call["learnable_sink"] is keywords["sinks_H"]
    assert (call["softmax_scale"], call["causal"], call["softcap"]) == (0.1, True, 30.0)
    assert call["seqused_q"].tolist() == [0, 70, 0, 9, 0, 0]
    assert call["seqused_q"].dtype is torch.int32
    assert_agrees(actual, args, keywords)


def test_flashinfer_is_given_a_plan_of_the_rows(fakes: dict[str, Any]) -> None:
    args, keywords = drawn()
    built(flashinfer.SOLUTION)(*args, **keywords)
    library = fakes["flashinfer"]
    ((workspace, kv_layout, backend),) = library.made
    assert (workspace.numel(), kv_layout, backend) == (flashinfer.WORKSPACE, "HND", "fa3")
    starts, page_starts, pages, last_lengths, *sizes = library.calls[0]
    assert starts.tolist() == keywords["query_start"].tolist()
    assert page_starts.tolist() == [0, 1, 8, 9, 12, 13, 14]
    assert last_lengths.tolist() == [1, 5, 1, 16, 1, 1]
    tables = keywords["block_tables_RB"]
    assert pages.tolist() == [0, *tables[1, :7].tolist(), 0, *tables[3, :3].tolist(), 0, 0]
    assert {each.dtype for each in (starts, page_starts, pages, last_lengths)} == {torch.int32}
    assert sizes == [HEADS, KV_HEADS, HEAD_DIM, BLOCK]
    assert library.keywords == {
        "causal": True,
        "sm_scale": 0.1,
        "logits_soft_cap": 0.0,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
    }


@pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda each: each.name)
@pytest.mark.parametrize("reason", ["window", "fp8", "head", "decode", "few-tiles", "no-rows"])
def test_what_the_library_does_not_have_goes_our_way(solution: Any, reason: str, fakes: dict[str, Any]) -> None:
    rows = {"decode": ((1, 50), (1, 3)), "few-tiles": ((40, 50),)}.get(reason, ((64, 64), (1, 5)))
    args, keywords = drawn(rows, head_dim=32 if reason == "head" else HEAD_DIM)
    if reason == "window":
        keywords["window"] = 20
    if reason == "fp8":
        args = (args[0], *(pages.to(torch.float8_e4m3fn) for pages in args[1:]))
    if reason == "no-rows":
        keywords |= {name: keywords[name][: 1 if name == "query_start" else 0] for name in
                     ("query_start", "seq_lens_R", "block_tables_RB")}  # fmt: skip
    actual = built(solution)(*args, **keywords)
    assert not fakes[solution.name].calls
    assert_agrees(actual, args, keywords)


def test_flashinfer_is_not_asked_for_sinks_or_heads_that_lie_apart(fakes: dict[str, Any]) -> None:
    args, keywords = drawn(((64, 64), (1, 5)))
    kernel = built(flashinfer.SOLUTION)
    kernel(*args, **keywords, sinks_H=torch.randn(HEADS))
    kernel(args[0], *(pages.contiguous() for pages in args[1:]), **keywords)
    assert not fakes["flashinfer"].calls
    kernel(*args, **keywords)
    assert len(fakes["flashinfer"].calls) == 1


@pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda each: each.name)
def test_says_why_it_does_not_run(solution: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, str] = {}
    capability = [9, 0]

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: tuple(capability))

    def reason(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str:
        support = solution.supports(KernelContext(device, dtype))
        return support.text if isinstance(support, Reason) else ""

    distribution, extra, good = {
        "flash_attn": ("flash-attn-4", "flash-attn", flash_attn.VERSION),
        "flashinfer": ("flashinfer-python", "flashinfer", "0.7.4"),
    }[solution.name]
    assert reason() == f"{distribution} is not installed: pip install 'tokenspeed[{extra}]'"
    assert "cpu" in reason("cpu")
    assert "float32" in reason(dtype=torch.float32)
    installed[distribution] = "1.2.3"
    assert reason().startswith(f"{distribution} is 1.2.3, not ")
    installed[distribution] = good
    assert reason() == ""
    capability[0] = 10
    assert "compute capability 9" in reason()


def test_ours_are_bound_where_both_run() -> None:
    for solution in SOLUTIONS:
        assert solution.band < triton.SOLUTION.band < gluon.SOLUTION.band
    assert flash_attn.SOLUTION.features == {SINKS}
    assert flashinfer.SOLUTION.features == frozenset()
    assert not flashinfer.SOLUTION.graph_safe  # its plan waits for the device


def test_a_tile_for_each_multiprocessor_is_the_least() -> None:
    args, keywords = drawn(((64, 64),))
    tensors = {name: keywords[name] for name in ("query_start", "seq_lens_R", "block_tables_RB", "scale", "soft_cap")}
    rows = _library.Rows(*args, **tensors, sinks_H=None)
    assert _library.has_tiles(rows, 64)
    assert not _library.has_tiles(rows, 32)
    assert isinstance(gluon.supports(KernelContext("cpu", torch.bfloat16)), Reason)
    assert not isinstance(triton.SOLUTION.supports(KernelContext("cpu", torch.bfloat16)), Ok)
