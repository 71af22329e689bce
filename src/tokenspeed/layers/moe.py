# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: a router that chooses some experts for each token, the experts, and one that all tokens share.

Ranks share out the experts, the inner width of each, or both. Knows the ways to route. Does not know which family
routes how, nor what a checkpoint calls anything.
Dimensions beside those of tokenspeed.layers: E experts, C experts chosen for a token, M pairs of a token and an expert.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from tokenspeed.kernels.ops.linear import Linear as LinearOp
from tokenspeed.kernels.ops.moe_experts import Gate, MoeExperts, Prepare
from tokenspeed.layers.activation import GATES, Activation, GatedMLP, activate_with, even_sigmoid, gate_and_up_rows
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.linear import Linear
from tokenspeed.layers.matrix import MatrixStack
from tokenspeed.layers.weight_map import Names, WeightChoice, WeightEntry, WeightSlot, linear_slots, slot
from tokenspeed.spmd import shards
from tokenspeed.spmd.graph import Graph, Value
from tokenspeed.spmd.mesh import Group
from tokenspeed.spmd.shards import Cut
from tokenspeed.spmd.step import View

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
    """(T, D) -> (T, E) float32 logits; `choose` turns them into experts."""

    def __init__(self, ctx: BuildContext, hidden_size: int, spec: RouterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = ctx.empty(spec.num_experts, hidden_size)
        self.bias = ctx.empty(spec.num_experts) if spec.bias else None
        # float32 whatever the model's dtype: rounding it would change which experts are chosen.
        self.correction = ctx.empty(spec.num_experts, dtype=torch.float32) if spec.correction else None
        self._linear: LinearOp = ctx.bind("linear")

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self._linear(x_TD, self.weight, self.bias, torch.float32)

    def choose(self, logits_TE: torch.Tensor) -> Routing:
        """The experts of each token."""
        return Routing(*route(self.spec, logits_TE, self.correction))


@dataclass(frozen=True, slots=True)
class Routing:
    """experts_TC: int64, numbered over all ranks. weights_TC: float32."""

    experts_TC: torch.Tensor
    weights_TC: torch.Tensor

    def taken(self, rows_N: torch.Tensor) -> Routing:
        """Of some of the tokens."""
        return Routing(self.experts_TC[rows_N], self.weights_TC[rows_N])


class Experts(nn.Module):
    """The blocks of this rank's experts, their weights stacked: gate_up (E, 2 F, D), down (E, D, F)."""

    def __init__(self, ctx: BuildContext, hidden_size: int, spec: ExpertsSpec) -> None:
        super().__init__()
        ctx.host_bound.add("experts")
        self.spec = spec
        num_experts, ff_size = spec.num_experts, spec.ff_size
        self.gate_cut = ctx.cut("experts", (num_experts, ff_size, hidden_size), shards.stacked(1))
        self.down_cut = ctx.cut("experts", (num_experts, hidden_size, ff_size), shards.stacked(2))
        self.gate_bias_cut = ctx.cut("experts", (num_experts, ff_size), shards.stacked(1).beside(3))
        self.down_bias_cut = ctx.cut("experts", (num_experts, hidden_size), shards.stacked(2).beside(3))
        self.num_local, self.local_ff_size, _ = self.gate_cut.local_shape
        self.first = self.gate_cut.index[0].start
        self.gate_up = MatrixStack(ctx, (self.num_local, 2 * self.local_ff_size, hidden_size), bias=spec.bias)
        self.down = MatrixStack(ctx, self.down_cut.local_shape, bias=spec.bias)
        gate_rows, up_rows = gate_and_up_rows(spec.activation, self.local_ff_size)
        self._gate = _StackPart.of(self.gate_up, gate_rows, self.gate_cut, self.gate_bias_cut)
        self._up = _StackPart.of(self.gate_up, up_rows, self.gate_cut, self.gate_bias_cut)
        self._down = _StackPart.of(self.down, slice(None), self.down_cut, self.down_bias_cut)
        self._activate = activate_with(ctx, spec.activation)
        self._prepare = cast("Prepare | None", ctx.bind_better("moe_experts"))
        self._run: MoeExperts | None = None

    def forward(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """(T, D): the chosen experts' outputs, weighted and added in float32, rounded once; experts of other ranks add
        nothing."""
        if self._run is None:
            self._run = self._prepared() or self._one_by_one
        return self._run(x_TD, routing.experts_TC, routing.weights_TC)

    def weight_slots(self, names: MoeNames) -> list[WeightEntry]:
        options = []
        if names.each is not None:
            options.append(tuple(self._each_slots(names.each)))
        if names.stacked is not None:
            options.append(tuple(self._stacked_slots(names.stacked, names.transposed)))
        assert options, names
        return [WeightChoice(tuple(options))] if len(options) > 1 else list(options[0])

    def _prepared(self) -> MoeExperts | None:
        """All experts as one op, whose weights are there by now; None where it is no better than one by one."""
        if self._prepare is None:
            return None
        return self._prepare(self.gate_up.described(), self.down.described(), _gate_of(self.spec), self.first)

    def _one_by_one(self, x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor) -> torch.Tensor:
        """Tokens are sorted by expert, so that an expert with tokens costs one product a projection and one without
        costs nothing."""
        num_tokens, num_chosen = experts_TC.shape
        experts_M = experts_TC.reshape(-1)
        order_M = experts_M.argsort(stable=True)
        counts: list[int] = experts_M.bincount(minlength=self.spec.num_experts).tolist()
        start = sum(counts[: self.first])
        has_all = self.num_local == self.spec.num_experts
        out_MD = x_TD.new_empty(len(order_M), x_TD.shape[1]) if has_all else x_TD.new_zeros(len(order_M), x_TD.shape[1])
        for expert, count in enumerate(counts[self.first : self.first + self.num_local]):
            if count:
                pairs = order_M[start : start + count]
                out_MD[pairs] = self._expert(expert, x_TD[pairs // num_chosen])
                start += count
        weighted_TCD = out_MD.view(num_tokens, num_chosen, x_TD.shape[1]).float() * weights_TC[:, :, None]
        return weighted_TCD.sum(dim=1).to(x_TD.dtype)

    def _expert(self, expert: int, x_MD: torch.Tensor) -> torch.Tensor:
        return self.down.product(expert, self._activate(self.gate_up.product(expert, x_MD)))

    def _each_slots(self, names: tuple[str, str, str]) -> list[WeightSlot]:
        slots = []
        for expert in range(self.spec.num_experts):
            for name, part in zip(names, (self._gate, self._up, self._down), strict=True):
                slots.append(self._of_expert(f"{name.format(expert)}.weight", part.weights, part.cut, expert))
                if part.bias is not None:
                    slots.append(self._of_expert(f"{name.format(expert)}.bias", part.biases, part.bias_cut, expert))
        return slots

    def _of_expert(self, name: str, targets: Sequence[torch.Tensor], cut: Cut, expert: int) -> WeightSlot:
        """The slot of one expert's tensor, empty where another rank has the expert."""
        if self.first <= expert < self.first + self.num_local:
            return slot(name, targets[expert - self.first], cut.at(0, expert))
        return slot(name, torch.empty(0, *targets[0].shape), Cut.nothing(cut.shape[1:]))

    def _stacked_slots(self, names: tuple[str, str], transposed: bool) -> list[WeightSlot]:
        """A tensor for all experts; gate and up are in one, as the activation reads them."""
        gate_up, down = names
        in_whole = gate_and_up_rows(self.spec.activation, self.spec.ff_size)
        gate_ups = list(zip((self._gate, self._up), in_whole, strict=True))
        slots = [_stacked(gate_up, part.weight, _widened(part.cut, whole), transposed) for part, whole in gate_ups]
        slots.append(_stacked(down, self._down.weight, self._down.cut, transposed))
        for part, whole in gate_ups:
            if part.bias is not None:
                slots.append(slot(f"{gate_up}_bias", part.bias, _widened(part.bias_cut, whole)))
        if self._down.bias is not None:
            slots.append(slot(f"{down}_bias", self._down.bias, self._down.bias_cut))
        return slots


@dataclass(frozen=True, slots=True)
class _StackPart:
    """Gate, up or down of all experts of this rank, and of each: views that a loader fills. They are made while the
    numbers have memory; what is packed has none."""

    weight: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    cut: Cut
    bias: torch.Tensor | None
    biases: tuple[torch.Tensor, ...]
    bias_cut: Cut

    @classmethod
    def of(cls, stack: MatrixStack, rows: slice, cut: Cut, bias_cut: Cut) -> _StackPart:
        weight = stack.weight.data[:, rows]
        bias = None if stack.bias is None else stack.bias.data[:, rows]
        return cls(weight, weight.unbind(0), cut, bias, () if bias is None else bias.unbind(0), bias_cut)


def _gate_of(spec: ExpertsSpec) -> Gate:
    activation = spec.activation
    if isinstance(activation, str):
        return Gate(GATES[activation])
    return Gate("clamped_swiglu", activation.alpha, activation.limit)


def _stacked(name: str, target: torch.Tensor, cut: Cut, transposed: bool) -> WeightSlot:
    return slot(name, target.transpose(1, 2), cut.transposed()) if transposed else slot(name, target, cut)


def _widened(cut: Cut, rows: slice) -> Cut:
    """The cut of gate or up, in the tensor that has both along dimension 1 and these of its rows."""
    old, step = cut.index[1], rows.step or 1
    first = (rows.start or 0) + old.start * step
    shape, index = list(cut.shape), list(cut.index)
    shape[1], index[1] = 2 * cut.shape[1], slice(first, first + (old.stop - old.start) * step, step)
    return Cut(tuple(shape), tuple(index), cut.has_values)


class MoE(nn.Module):
    """In the place of a feed-forward block."""

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

    def declare(self, graph: Graph, name: str, x: Value) -> Value:
        """Routed experts and what all tokens share are addends of one sum."""
        spec = self.router.spec
        logits = graph.router(
            f"{name}.router", x, spec.num_experts, bias=spec.bias, run=lambda _, x_TD: self.router(x_TD)
        )
        routed = graph.experts(f"{name}.experts", x, logits, spec.top_k, run=self._run_experts)
        if self.shared is None:
            return routed
        shared = graph.feed_forward(f"{name}.shared", x, run=lambda _, x_TD: self._run_shared(x_TD))
        return graph.add(f"{name}.sum", routed, shared, run=lambda _, one_TD, other_TD: one_TD + other_TD)

    def weight_slots(self) -> list[WeightEntry]:
        """Names relative to the layer."""
        names, router = self.names, self.router
        entries: list[WeightEntry] = [_any_of(names.router, "weight", router.weight)]
        if router.bias is not None:
            entries.append(_any_of(names.router, "bias", router.bias))
        if router.correction is not None:
            correction = router.correction.data
            entries.append(WeightSlot(names.correction, correction, Cut.whole(correction.shape)))
        entries += self.experts.weight_slots(names)
        if self.shared is not None:
            entries += self.shared.weight_slots()
        if self.shared_gate is not None:
            entries += linear_slots(names.shared_gate, self.shared_gate)
        return entries

    def _run_shared(self, x_TD: torch.Tensor) -> torch.Tensor:
        assert self.shared is not None, "nothing is shared"
        shared_TD: torch.Tensor = self.shared(x_TD)
        return shared_TD if self.shared_gate is None else even_sigmoid(self.shared_gate(x_TD)) * shared_TD

    def _run_experts(
        self, view: View, x_TD: torch.Tensor, logits_TE: torch.Tensor
    ) -> torch.Tensor | Generator[Any, Any, torch.Tensor]:
        routing = self.router.choose(logits_TE)
        if view.exchanges():
            return self._travelling(view, x_TD, routing)
        return self.experts(x_TD, routing)  # type: ignore[no-any-return]

    def _travelling(self, view: View, x_TD: torch.Tensor, routing: Routing) -> Generator[Any, Any, torch.Tensor]:
        """Rows go to the ranks of their experts, each rank's once, and their sums come back."""
        owner_TC = routing.experts_TC // self.experts.num_local
        rows = [(owner_TC == member).any(dim=1).nonzero()[:, 0] for member in range(view.size(Group.EP))]
        arrived = yield view.exchange(0, [_packed(x_TD[each], routing.taken(each)) for each in rows])
        done_ND: torch.Tensor = self.experts(*_unpacked(torch.cat(arrived), x_TD.shape[1]))
        returned = yield view.exchange(1, torch.split(done_ND, [len(each) for each in arrived]))
        out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        for each, back_ND in zip(rows, returned, strict=True):
            out_TD.index_add_(0, each, back_ND.float())
        return out_TD.to(x_TD.dtype)


def _packed(x_ND: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Rows and their routing as one tensor of the rows' dtype, bits unchanged."""
    routed = torch.cat((routing.experts_TC.int(), routing.weights_TC.view(torch.int32)), dim=1)
    return torch.cat((x_ND, routed.view(x_ND.dtype)), dim=1)


def _unpacked(packed: torch.Tensor, width: int) -> tuple[torch.Tensor, Routing]:
    experts_NC, weights_NC = packed[:, width:].contiguous().view(torch.int32).chunk(2, dim=1)
    return packed[:, :width].contiguous(), Routing(experts_NC.long(), weights_NC.contiguous().view(torch.float32))


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
    names = tuple(f"{module}.{tensor}" for module in modules)
    return WeightSlot(names, target.data, Cut.whole(target.shape))
