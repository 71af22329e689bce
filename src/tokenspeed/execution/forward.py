# SPDX-License-Identifier: Apache-2.0
"""A model and the plans by which one rank runs it: token ids in, logits out.

Compiles what the model declares for the mesh and binds it to the rank's collectives. Knows neither seats nor sampling.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from tokenspeed.core.errors import StartError
from tokenspeed.kernels.ops.collective import Communicator
from tokenspeed.layers.build import BuildContext
from tokenspeed.spmd.compiler import compile_plan
from tokenspeed.spmd.cost import CostModel
from tokenspeed.spmd.executor import Executor
from tokenspeed.spmd.graph import Graph, Value
from tokenspeed.spmd.placement import TokenTable
from tokenspeed.spmd.program import Plan
from tokenspeed.spmd.ranks import Alone, MeshCollectives
from tokenspeed.spmd.step import StepInput

LOGITS, HIDDEN = "logits", "hidden"


class Declares(Protocol):
    """The part of a model that says what is computed, see models.CausalLM."""

    def declare(self, graph: Graph) -> Value: ...

    def declare_head(self, graph: Graph, hidden: Value) -> Value: ...


class Forward:
    """One rank of a model. Every rank makes the same calls with the same steps, but for what a step's context says of
    its own partition. cost: prices to plan by. StartError when the ranks do not agree on their plans."""

    def __init__(
        self,
        model: Declares,
        ctx: BuildContext,
        communicator: Communicator | None = None,
        cost: CostModel | None = None,
    ) -> None:
        hidden_size, plain = _declared(model, ctx, taps_hidden=False)
        _, tapped = _declared(model, ctx, taps_hidden=True)
        head = Graph(ctx.dtype.itemsize)
        head.output(LOGITS, model.declare_head(head, head.source(HIDDEN, hidden_size)))
        graphs = (plain, tapped, head)
        plans = [compile_plan(graph, ctx.mesh, model=cost) for graph in graphs]
        self._mesh, device = ctx.mesh, torch.device(ctx.device)
        if communicator is None:
            assert ctx.mesh.num_ranks == 1, f"nobody to talk to on {ctx.mesh}"
            collectives = Alone(device, ctx.dtype)
        else:
            _agree(communicator, plans)
            collectives = MeshCollectives(communicator, ctx.mesh, plans, device, ctx.dtype)
        self._plain, self._tapped, self._head = (
            _Runs(plan, ctx.rank, graph, collectives) for plan, graph in zip(plans, graphs, strict=True)
        )

    def logits(self, step: StepInput) -> torch.Tensor:
        """(S, V) float32 of all sampled rows of the step. Source: "token_ids", (T,) int64 of all tokens."""
        return self._plain.run(step)[LOGITS]

    def logits_and_hidden(self, step: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """As logits, and hidden states (T, D) of all tokens after the last norm."""
        outputs = self._tapped.run(step)
        return outputs[LOGITS], outputs[HIDDEN]

    def head(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """(N, V) float32 of some hidden states, which every rank has."""
        counts = (len(hidden_ND), *([0] * (self._mesh.sizes.attention_dp - 1)))
        step = StepInput(TokenTable.of(self._mesh, counts), {HIDDEN: hidden_ND}, np.arange(0))
        return self._head.run(step)[LOGITS]


class _Runs:
    """The executors of a plan."""

    def __init__(self, plan: Plan, rank: int, graph: Graph, collectives: Alone) -> None:
        self._plan = plan
        self._executors = {
            id(variant.program): Executor(variant.program, rank, graph.maths, collectives) for variant in plan.variants
        }

    def run(self, step: StepInput) -> dict[str, torch.Tensor]:
        """The outputs by name."""
        return self._executors[id(self._plan.program_for(step.table))].run(step)


def plan_of(model: Declares, ctx: BuildContext) -> Plan:
    """The plan of a step without anything extra, for people to read."""
    return compile_plan(_declared(model, ctx, taps_hidden=False)[1], ctx.mesh)


def _declared(model: Declares, ctx: BuildContext, *, taps_hidden: bool) -> tuple[int, Graph]:
    graph = Graph(ctx.dtype.itemsize)
    hidden = model.declare(graph)
    if taps_hidden:
        graph.output(HIDDEN, hidden)
    graph.output(LOGITS, model.declare_head(graph, graph.select("select", hidden)))
    return hidden.width, graph


def _agree(communicator: Communicator, plans: list[Plan]) -> None:
    digests = communicator.gather(" ".join(plan.digest() for plan in plans))
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise StartError(f"rank {rank} has another plan than rank 0: {digest}, not {digests[0]}")
