# SPDX-License-Identifier: Apache-2.0
"""Routing against formulas written a token at a time, experts against a loop over pairs, and where their weights go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.kernels.platform import compiled_cpu
from tokenspeed.kernels.registry import KernelContext, Ok
from tokenspeed.layers.activation import ClampedSwiglu
from tokenspeed.layers.build import ONE_RANK, BuildContext
from tokenspeed.layers.moe import (
    ExpertsSpec,
    GroupLimit,
    MoE,
    MoeNames,
    MoeSpec,
    RouterSpec,
    Routing,
    Scoring,
    SharedSpec,
    route,
)
from tokenspeed.layers.weight_map import WeightMap
from tokenspeed.spmd.compiler import compile_plan
from tokenspeed.spmd.executor import Executor
from tokenspeed.spmd.graph import Graph
from tokenspeed.spmd.placement import TokenTable
from tokenspeed.spmd.ranks import Alone
from tokenspeed.spmd.step import StepInput

NUM_EXPERTS, HIDDEN, FF = 8, 12, 10
NAMES = MoeNames(
    router=("gate",),
    each=("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj"),
    stacked=("experts.gate_up_proj", "experts.down_proj"),
    correction=("gate.correction",),
    shared=("shared.gate_proj", "shared.up_proj", "shared.down_proj"),
    shared_gate="shared_gate",
)
SOFTMAX = RouterSpec(NUM_EXPERTS, 3, Scoring.SOFTMAX)
ROUTERS = {
    "softmax": SOFTMAX,
    "softmax-renormalised": RouterSpec(NUM_EXPERTS, 3, Scoring.SOFTMAX, renormalise=True),
    "softmax-of-chosen": RouterSpec(NUM_EXPERTS, 2, Scoring.SOFTMAX_OF_CHOSEN, bias=True),
    "softmax-groups-scaled": RouterSpec(NUM_EXPERTS, 3, Scoring.SOFTMAX, scale=16.0, groups=GroupLimit(4, 2, 1)),
    "sigmoid-correction": RouterSpec(NUM_EXPERTS, 3, Scoring.SIGMOID, renormalise=True, correction=True),
    "sigmoid-correction-groups-scaled": RouterSpec(
        NUM_EXPERTS, 3, Scoring.SIGMOID, True, 2.5, GroupLimit(4, 2, 2), correction=True
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(moe: MoE, x_TD: torch.Tensor) -> torch.Tensor:
    """The layer as a model of one rank would run it."""
    graph = Graph()
    graph.output("out", moe.declare(graph, "moe", graph.source("x", HIDDEN)))
    [variant] = compile_plan(graph, ONE_RANK).variants
    executor = Executor(variant.program, 0, graph.maths, Alone(torch.device("cpu"), x_TD.dtype))
    out: torch.Tensor = executor.run(StepInput(TokenTable.of(ONE_RANK, (len(x_TD),)), {"x": x_TD}, np.arange(0)))["out"]
    return out


def new_moe(spec: MoeSpec, names: MoeNames = NAMES, seed: int = 1, *, one_by_one: bool = False) -> MoE:
    """one_by_one: without the op that computes all experts."""
    overrides = {"moe_experts": "reference"} if one_by_one else {}
    moe = MoE(BuildContext("cpu", torch.float32, overrides), HIDDEN, spec, names=names)
    for index, parameter in enumerate(moe.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=seed + index) * HIDDEN**-0.5)
    return moe


def plainly(spec: RouterSpec, logits: Sequence[float], correction: Sequence[float]) -> dict[int, float]:
    """Expert -> weight for one token, in Python numbers."""
    exps = [math.exp(logit) for logit in logits]
    if spec.scoring is Scoring.SOFTMAX:
        scores = [value / sum(exps) for value in exps]
    elif spec.scoring is Scoring.SIGMOID:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        scores = list(logits)
    ranking = {expert: score + correction[expert] for expert, score in enumerate(scores)}
    if spec.groups is not None:
        size = spec.num_experts // spec.groups.num_groups
        members = [range(start, start + size) for start in range(0, spec.num_experts, size)]
        heights = [sum(sorted(ranking[each] for each in group)[-spec.groups.num_best :]) for group in members]
        best = sorted(range(len(members)), key=lambda group: heights[group])[-spec.groups.num_chosen :]
        allowed = [each for group in best for each in members[group]]
        ranking = {expert: ranking[expert] for expert in allowed}
    chosen = sorted(ranking, key=lambda expert: ranking[expert])[-spec.top_k :]
    if spec.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        return {expert: exps[expert] / sum(exps[each] for each in chosen) for expert in chosen}
    total = sum(scores[expert] for expert in chosen) if spec.renormalise else 1.0
    return {expert: scores[expert] / total * spec.scale for expert in chosen}


@pytest.mark.parametrize("name", ROUTERS)
def test_routes_as_the_formula_says(name: str) -> None:
    spec = ROUTERS[name]
    logits, correction = random(50, NUM_EXPERTS), random(NUM_EXPERTS, seed=4)
    experts, weights = route(spec, logits, correction if spec.correction else None)
    assert experts.shape == weights.shape == (50, spec.top_k)
    used = correction.tolist() if spec.correction else [0.0] * NUM_EXPERTS
    for token in range(50):
        expected = plainly(spec, logits[token].tolist(), used)
        actual = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
        assert actual == pytest.approx(expected, rel=1e-5), token


def test_correction_changes_the_choice_but_not_the_weights() -> None:
    spec = RouterSpec(4, 1, Scoring.SIGMOID, correction=True)
    logits = torch.tensor([[3.0, 0.0, 0.0, 0.0]])
    experts, weights = route(spec, logits, torch.tensor([0.0, 5.0, 0.0, 0.0]))
    assert experts.tolist() == [[1]]
    assert weights.tolist() == [[0.5]]


def pair_by_pair(moe: MoE, x_TD: torch.Tensor) -> torch.Tensor:
    """The layer's output from one small product for each pair of a token and an expert, in float64."""
    routing = moe.router.choose(moe.router(x_TD))
    experts_TC, weights_TC = routing.experts_TC, routing.weights_TC
    out = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token, (experts, weights) in enumerate(zip(experts_TC.tolist(), weights_TC.tolist(), strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            out[token] += weight * one_expert(moe, expert, x_TD[token].double())
    return out


def one_expert(moe: MoE, expert: int, x_D: torch.Tensor) -> torch.Tensor:
    part = moe.experts
    both = part.gate_up.weight[expert].double() @ x_D
    if part.gate_up.bias is not None:
        both = both + part.gate_up.bias[expert].double()
    activation = part.spec.activation
    if isinstance(activation, ClampedSwiglu):
        pairs = both.view(-1, 2)
        gate, up = pairs[:, 0].clamp(max=activation.limit), pairs[:, 1].clamp(-activation.limit, activation.limit)
        hidden = gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    else:
        gate, up = both.chunk(2)
        is_silu = activation == "silu_mul"
        hidden = up * (gate * torch.sigmoid(gate) if is_silu else torch.nn.functional.gelu(gate, approximate="tanh"))
    down = part.down.weight[expert].double() @ hidden
    return down if part.down.bias is None else down + part.down.bias[expert].double()


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 33])
@pytest.mark.parametrize(
    "experts",
    [
        ExpertsSpec(NUM_EXPERTS, FF),
        ExpertsSpec(NUM_EXPERTS, FF, ClampedSwiglu(limit=0.4), bias=True),
        ExpertsSpec(NUM_EXPERTS, FF, "gelu_tanh_mul"),
    ],
    ids=["silu", "clamped-biases", "gelu"],
)
def test_grouped_execution_equals_pair_by_pair(num_tokens: int, experts: ExpertsSpec, one_by_one: bool) -> None:
    moe = new_moe(MoeSpec(SOFTMAX, experts), one_by_one=one_by_one)
    x_TD = random(num_tokens, HIDDEN, seed=9)
    actual = run(moe, x_TD)
    assert actual.shape == (num_tokens, HIDDEN)
    torch.testing.assert_close(actual.double(), pair_by_pair(moe, x_TD), rtol=1e-4, atol=1e-5)


def test_experts_without_tokens_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = new_moe(MoeSpec(SOFTMAX, ExpertsSpec(NUM_EXPERTS, FF)), one_by_one=True)
    calls: list[tuple[int, int]] = []
    real = moe.experts._expert
    monkeypatch.setattr(moe.experts, "_expert", lambda expert, x: (calls.append((expert, len(x))), real(expert, x))[1])
    moe.experts(random(3, HIDDEN), Routing(torch.tensor([[5, 1], [1, 6], [1, 5]]), torch.ones(3, 2)))
    assert calls == [(1, 3), (5, 2), (6, 1)]


@pytest.mark.skipif(
    compiled_cpu(KernelContext("cpu", torch.float32)) != Ok(), reason="the compiled kernels are not built"
)
def test_experts_are_one_op_where_a_kernel_has_it() -> None:
    ctx = BuildContext("cpu", torch.float32)
    moe = MoE(ctx, HIDDEN, MoeSpec(SOFTMAX, EXPERTS), names=NAMES)
    assert ctx.bindings["moe_experts"].solution == "cpu"
    for parameter in moe.parameters():
        parameter.data.zero_()
    run(moe, random(2, HIDDEN))
    assert moe.experts._run != moe.experts._one_by_one


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("scoring", Scoring)
def test_a_token_has_the_same_bits_whatever_its_neighbours(scoring: Scoring, one_by_one: bool) -> None:
    router = RouterSpec(7, 3, scoring, renormalise=True)
    moe = new_moe(MoeSpec(router, ExpertsSpec(7, FF), SharedSpec(FF, gated=True)), one_by_one=one_by_one)
    x_TD = random(41, HIDDEN, seed=2)
    alone = torch.cat([run(moe, x_TD[token : token + 1]) for token in range(41)])
    assert torch.equal(run(moe, x_TD), alone)


@pytest.mark.parametrize("gated", [False, True])
def test_shared_block_is_added_for_every_token(gated: bool) -> None:
    moe = new_moe(MoeSpec(SOFTMAX, ExpertsSpec(NUM_EXPERTS, FF), SharedSpec(FF, gated=gated)))
    x_TD = random(5, HIDDEN, seed=3)
    gate, up = moe.shared.gate_up.weight.chunk(2)
    shared = (torch.nn.functional.silu(x_TD @ gate.T) * (x_TD @ up.T)) @ moe.shared.down.weight.T
    if gated:
        shared = torch.sigmoid(x_TD @ moe.shared_gate.weight.T) * shared
    expected = pair_by_pair(moe, x_TD) + shared.double()
    torch.testing.assert_close(run(moe, x_TD).double(), expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_router_keeps_its_correction_in_float32() -> None:
    moe = MoE(BuildContext("cpu", torch.bfloat16), HIDDEN, MoeSpec(ROUTERS["sigmoid-correction"], EXPERTS), names=NAMES)
    assert moe.router.correction is not None
    assert moe.router.correction.dtype is torch.float32
    assert moe.router.weight.dtype is torch.bfloat16


EXPERTS = ExpertsSpec(NUM_EXPERTS, FF)
CLAMPED = ExpertsSpec(NUM_EXPERTS, FF, ClampedSwiglu(), bias=True)


def filled(moe: MoE, names: Sequence[str], tensors: dict[str, torch.Tensor]) -> None:
    """Load as a checkpoint with these tensor names would be."""
    for parameter in moe.parameters():
        parameter.data.fill_(float("nan"))
    weight_map = WeightMap(tuple(moe.weight_slots()), ()).for_checkpoint(names)
    used = set()
    for slot in weight_map:
        assert slot.cut.shape == tensors[slot.name].shape, slot.name
        slot.fill(tensors[slot.name])
        used.add(slot.name)
    assert used == set(names)


def checkpoint(moe: MoE, form: str) -> dict[str, torch.Tensor]:
    part, tensors = moe.experts, {"gate.weight": moe.router.weight}
    interleaved = isinstance(part.spec.activation, ClampedSwiglu)
    if form == "each":
        for expert in range(NUM_EXPERTS):
            rows = part.gate_up.weight[expert]
            gate, up = (rows[::2], rows[1::2]) if interleaved else rows.chunk(2)
            for name, tensor in (("gate", gate), ("up", up), ("down", part.down.weight[expert])):
                tensors[f"experts.{expert}.{name}_proj.weight"] = tensor
            if part.gate_up.bias is not None:
                bias = part.gate_up.bias[expert]
                for name, tensor in (("gate", bias[::2]), ("up", bias[1::2]), ("down", part.down.bias[expert])):
                    tensors[f"experts.{expert}.{name}_proj.bias"] = tensor
    else:
        turned = (lambda tensor: tensor.mT) if form == "transposed" else (lambda tensor: tensor)
        tensors |= {"experts.gate_up_proj": turned(part.gate_up.weight)}
        tensors |= {"experts.down_proj": turned(part.down.weight)}
        if part.gate_up.bias is not None:
            tensors |= {"experts.gate_up_proj_bias": part.gate_up.bias, "experts.down_proj_bias": part.down.bias}
    return {name: tensor.data.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("experts", [EXPERTS, CLAMPED], ids=["silu", "clamped-biases"])
@pytest.mark.parametrize("form", ["each", "stacked", "transposed"])
def test_weights_load_from_a_tensor_an_expert_and_from_stacked_ones(form: str, experts: ExpertsSpec) -> None:
    names = MoeNames(NAMES.router, NAMES.each, NAMES.stacked, transposed=form == "transposed")
    source = new_moe(MoeSpec(SOFTMAX, experts), names)
    tensors = checkpoint(source, form)
    target = new_moe(MoeSpec(SOFTMAX, experts), names, seed=70)
    filled(target, list(tensors), tensors)
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_one_renamed_tensor_does_not_change_which_form_is_expected() -> None:
    moe = new_moe(MoeSpec(SOFTMAX, EXPERTS))
    entries = WeightMap(tuple(moe.weight_slots()), ())
    for form, expected in (("each", "experts.7.down_proj.weight"), ("stacked", "experts.down_proj")):
        names = [name for name in checkpoint(moe, form) if name != expected]
        assert [slot.name for slot in entries.for_checkpoint(names) if slot.name not in names] == [expected]


def test_every_part_has_a_name() -> None:
    moe = new_moe(MoeSpec(ROUTERS["sigmoid-correction"], EXPERTS, SharedSpec(FF, gated=True)))
    slots: list[Any] = list(WeightMap(tuple(moe.weight_slots()), ()))
    assert sum(slot.target.numel() for slot in slots) == sum(each.numel() for each in moe.parameters())
    names = {slot.name for slot in slots if "experts" not in slot.name}
    assert names == {
        "gate.weight",
        "gate.correction",
        "shared.gate_proj.weight",
        "shared.up_proj.weight",
        "shared.down_proj.weight",
        "shared_gate.weight",
    }
