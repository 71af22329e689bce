# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: a router that chooses some experts for each token, the experts, and one that all tokens share.

Knows the ways to route. Does not know which family routes how, nor what a checkpoint calls anything.
Dimensions beside those of tokenspeed.layers: E experts, C experts chosen for a token, M pairs of a token and an expert.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import nn

from tokenspeed.kernels.ops.linear import Linear as LinearOp
from tokenspeed.layers.activation import Activation, GatedMLP, activate_with, even_sigmoid, gate_and_up_rows
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.linear import Linear
from tokenspeed.layers.weight_map import Names, WeightChoice, WeightEntry, WeightSlot, linear_slots, slot

_SUM_FLOOR = 1e-20


class Scoring(enum.Enum):
    """How router logits become the weights of experts."""

    SOFTMAX = "softmax over all experts"
    SOFTMAX_OF_CHOSEN = "softmax over the chosen experts"
    SIGMOID = "sigmoid of each expert"


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """Experts lie in num_groups equal groups, and a token chooses within the num_chosen best of them. A group ranks by
    the sum of its num_best highest scores."""

    num_groups: int
    num_chosen: int
    num_best: int


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """One router. renormalise: the weights of a token's experts are made to sum to one; scale then multiplies them.
    bias: added to the logits. correction: a stored value an expert, added to scores to choose by them and not to the
    weights."""

    num_experts: int
    top_k: int
    scoring: Scoring
    renormalise: bool = False
    scale: float = 1.0
    groups: GroupLimit | None = None
    bias: bool = False
    correction: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The feed-forward block of each expert. bias: on both projections."""

    num_experts: int
    ff_size: int
    activation: Activation = "silu_mul"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """The block that every token passes. gated: its output is multiplied by the sigmoid of a projection of the token
    to one number."""

    ff_size: int
    activation: str = "silu_mul"
    gated: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A whole layer."""

    router: RouterSpec
    experts: ExpertsSpec
    shared: SharedSpec | None = None

    def __post_init__(self) -> None:
        assert self.router.num_experts == self.experts.num_experts, (self.router, self.experts)
        assert 0 < self.router.top_k <= self.router.num_experts, self.router
        groups = self.router.groups
        assert groups is None or self.router.num_experts % groups.num_groups == 0, self.router


@dataclass(frozen=True, slots=True)
class MoeNames:
    """What a checkpoint calls the parts, relative to the layer.

    router: module names of the router, any of which may be used. correction: tensor names likewise.
    each: module names of one expert's gate, up and down, with {} for its number; None where no checkpoint has them.
    stacked: tensor names of gate_up (E, 2 F, D) and down (E, D, F) of all experts, their biases with `_bias` after the
    name; (E, D, 2 F) and (E, F, D) where transposed. None where no checkpoint has them.
    shared: module names of the shared block's parts, as in GatedMLP.
    """

    router: Names
    each: tuple[str, str, str] | None
    stacked: tuple[str, str] | None
    transposed: bool = False
    correction: Names = ()
    shared: Names = ()
    shared_gate: str = ""


def route(
    spec: RouterSpec, logits_TE: torch.Tensor, correction_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts_TC int64, weights_TC float32) of float32 logits."""
    scores_TE = _scores(spec.scoring, logits_TE)
    ranking_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if spec.groups is not None:
        ranking_TE = _within_best_groups(spec.groups, ranking_TE)
    experts_TC = ranking_TE.topk(spec.top_k, dim=-1).indices
    weights_TC = scores_TE.gather(1, experts_TC)
    if spec.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights_TC = weights_TC.softmax(dim=-1)
    if spec.renormalise:
        weights_TC = weights_TC / (weights_TC.sum(dim=-1, keepdim=True) + _SUM_FLOOR)
    return experts_TC, weights_TC * spec.scale


class Router(nn.Module):
    """(T, D) -> (experts_TC int64, weights_TC float32)."""

    def __init__(self, ctx: BuildContext, hidden_size: int, spec: RouterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = ctx.empty(spec.num_experts, hidden_size)
        self.bias = ctx.empty(spec.num_experts) if spec.bias else None
        # float32 whatever the model's dtype: rounding it would change which experts are chosen.
        self.correction = ctx.empty(spec.num_experts, dtype=torch.float32) if spec.correction else None
        self._linear: LinearOp = ctx.bind("linear")

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route(self.spec, self._linear(x_TD, self.weight, self.bias, torch.float32), self.correction)


class Experts(nn.Module):
    """The blocks of all experts, their weights stacked: gate_up (E, 2 F, D), down (E, D, F)."""

    def __init__(self, ctx: BuildContext, hidden_size: int, spec: ExpertsSpec) -> None:
        super().__init__()
        self.spec = spec
        self.gate_up = ctx.empty(spec.num_experts, 2 * spec.ff_size, hidden_size)
        self.gate_up_bias = ctx.empty(spec.num_experts, 2 * spec.ff_size) if spec.bias else None
        self.down = ctx.empty(spec.num_experts, hidden_size, spec.ff_size)
        self.down_bias = ctx.empty(spec.num_experts, hidden_size) if spec.bias else None
        self._activate = activate_with(ctx, spec.activation)
        self._linear: LinearOp = ctx.bind("linear")

    def forward(self, x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor) -> torch.Tensor:
        """(T, D): the chosen experts' outputs, weighted and added in float32, rounded once. Tokens are sorted by
        expert, so that an expert with tokens costs one product a projection and one without costs nothing."""
        num_tokens, num_chosen = experts_TC.shape
        experts_M = experts_TC.reshape(-1)
        order_M = experts_M.argsort(stable=True)
        counts: list[int] = experts_M.bincount(minlength=self.spec.num_experts).tolist()
        sorted_MD = x_TD[order_M // num_chosen]
        out_MD = torch.empty_like(sorted_MD)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                out_MD[order_M[start : start + count]] = self._expert(expert, sorted_MD[start : start + count])
                start += count
        weighted_TCD = out_MD.view(num_tokens, num_chosen, x_TD.shape[1]).float() * weights_TC[:, :, None]
        return weighted_TCD.sum(dim=1).to(x_TD.dtype)

    def weight_slots(self, names: MoeNames) -> list[WeightEntry]:
        options = []
        if names.each is not None:
            options.append(tuple(self._each_slots(names.each)))
        if names.stacked is not None:
            options.append(tuple(self._stacked_slots(names.stacked, names.transposed)))
        assert options, names
        return [WeightChoice(tuple(options))] if len(options) > 1 else list(options[0])

    def _expert(self, expert: int, x_MD: torch.Tensor) -> torch.Tensor:
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        down_bias = None if self.down_bias is None else self.down_bias[expert]
        hidden_MF = self._activate(self._linear(x_MD, self.gate_up[expert], gate_up_bias))
        return self._linear(hidden_MF, self.down[expert], down_bias)

    def _each_slots(self, names: tuple[str, str, str]) -> list[WeightSlot]:
        gate, up = gate_and_up_rows(self.spec.activation, self.spec.ff_size)
        whole = slice(None)
        parts = (
            (self.gate_up, self.gate_up_bias, gate),
            (self.gate_up, self.gate_up_bias, up),
            (self.down, self.down_bias, whole),
        )
        slots = []
        for expert in range(self.spec.num_experts):
            for name, (weight, bias, rows) in zip(names, parts, strict=True):
                slots.append(slot(f"{name.format(expert)}.weight", weight[expert, rows]))
                if bias is not None:
                    slots.append(slot(f"{name.format(expert)}.bias", bias[expert, rows]))
        return slots

    def _stacked_slots(self, names: tuple[str, str], transposed: bool) -> list[WeightSlot]:
        slots = []
        parts = ((self.gate_up, self.gate_up_bias), (self.down, self.down_bias))
        for name, (weight, bias) in zip(names, parts, strict=True):
            slots.append(slot(name, weight.transpose(1, 2) if transposed else weight))
            if bias is not None:
                slots.append(slot(f"{name}_bias", bias))
        return slots


class MoE(nn.Module):
    """(T, D) -> (T, D), in the place of a feed-forward block."""

    def __init__(self, ctx: BuildContext, hidden_size: int, spec: MoeSpec, *, names: MoeNames) -> None:
        super().__init__()
        self.names = names
        self.router = Router(ctx, hidden_size, spec.router)
        self.experts = Experts(ctx, hidden_size, spec.experts)
        self.shared: GatedMLP | None = None
        self.shared_gate: Linear | None = None
        if spec.shared is not None:
            shared = spec.shared
            self.shared = GatedMLP(ctx, hidden_size, shared.ff_size, shared.activation, names=names.shared)
            self.shared_gate = Linear(ctx, hidden_size, 1) if shared.gated else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        out_TD: torch.Tensor = self.experts(x_TD, *self.router(x_TD))
        if self.shared is None:
            return out_TD
        shared_TD: torch.Tensor = self.shared(x_TD)
        return out_TD + (shared_TD if self.shared_gate is None else even_sigmoid(self.shared_gate(x_TD)) * shared_TD)

    def weight_slots(self) -> list[WeightEntry]:
        """Names relative to the layer."""
        names, router = self.names, self.router
        entries: list[WeightEntry] = [_any_of(names.router, "weight", router.weight)]
        if router.bias is not None:
            entries.append(_any_of(names.router, "bias", router.bias))
        if router.correction is not None:
            entries.append(WeightSlot(names.correction, router.correction.data))
        entries += self.experts.weight_slots(names)
        if self.shared is not None:
            entries += self.shared.weight_slots()
        if self.shared_gate is not None:
            entries += linear_slots(names.shared_gate, self.shared_gate)
        return entries


def _scores(scoring: Scoring, logits_TE: torch.Tensor) -> torch.Tensor:
    if scoring is Scoring.SOFTMAX:
        return logits_TE.softmax(dim=-1)
    return even_sigmoid(logits_TE) if scoring is Scoring.SIGMOID else logits_TE


def _within_best_groups(groups: GroupLimit, ranking_TE: torch.Tensor) -> torch.Tensor:
    """The ranking with experts outside the chosen groups out of reach."""
    grouped = ranking_TE.view(ranking_TE.shape[0], groups.num_groups, ranking_TE.shape[1] // groups.num_groups)
    group_ranking = grouped.topk(groups.num_best, dim=-1).values.sum(dim=-1)
    chosen = group_ranking.topk(groups.num_chosen, dim=-1).indices
    outside = torch.ones_like(group_ranking, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(outside[:, :, None], float("-inf")).flatten(1)


def _any_of(modules: Names, tensor: str, target: torch.Tensor) -> WeightSlot:
    return WeightSlot(tuple(f"{module}.{tensor}" for module in modules), target.data)
