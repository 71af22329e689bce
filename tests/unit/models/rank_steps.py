# SPDX-License-Identifier: Apache-2.0
"""What each rank of a test does: its part of a model, some steps with idle partitions among them, and a note of every
exchange. Runs on threads and in processes of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenspeed.execution.forward import Forward
from tokenspeed.kernels.ops.collective import Communicator, Rendezvous, open_store
from tokenspeed.kernels.registry import KernelContext, bind
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import TOKEN_IDS
from tokenspeed.models import CausalLM, resolve
from tokenspeed.spmd.cost import CostModel
from tokenspeed.spmd.mesh import Group, GroupSizes, Mesh
from tokenspeed.spmd.placement import TokenTable
from tokenspeed.spmd.step import StepInput
from unit.models.sessions import Session, load

MAX_LEN, TIMEOUT_S = 32, 60.0
SEQUENCES = ((0, 1), (2, 3))
"""By partition, where there are two."""
MESHES = {
    "tp2": GroupSizes.of(2),
    "tp4": GroupSizes.of(4),
    "ep2": GroupSizes.of(2, ep=2),
    "dp2": GroupSizes.of(1, attention_dp=2, ep=2),
    "tp2-dp2": GroupSizes.of(2, attention_dp=2),
    "tp2-dp2-ep2": GroupSizes.of(2, attention_dp=2, ep=2),
    "tp4-moe2": GroupSizes.of(4, ep=1, moe_tp=2),
}
PRICES = {"launches": CostModel(), "bytes": CostModel(0, 0, 1_000, 700)}
STEPS: tuple[dict[int, int], ...] = (
    {0: 7, 2: 9},  # both partitions prefill
    {1: 5},  # the second is idle
    {0: 1, 1: 1, 2: 1},
    {3: 11},  # the first is idle
    {0: 1, 1: 4, 2: 1, 3: 2},
)
"""Tokens fed to each sequence."""


class Recorder:
    """A communicator that notes what is called on which of its groups."""

    def __init__(self, inner: Communicator) -> None:
        self.inner, self.calls = inner, []  # type: ignore[var-annotated]
        self.rank, self.world_size = inner.rank, inner.world_size

    def group(self, members: Sequence[Sequence[int]]) -> Any:
        inner = self.inner.group(members)
        partition = tuple(map(tuple, members))

        class Noting:
            def __getattr__(noting, name: str) -> Any:
                if name != "members":
                    self.calls.append((name, partition))
                return getattr(inner, name)

        return Noting()

    def gather(self, word: str) -> tuple[str, ...]:
        return self.inner.gather(word)

    def close(self) -> None:
        self.inner.close()


def tokens_of(step: int, chunk: Mapping[int, int]) -> dict[int, list[int]]:
    """The same ids on all ranks."""
    rng = np.random.default_rng(step)
    return {sequence: rng.integers(0, 96, count).tolist() for sequence, count in chunk.items()}


def build(config: Mapping[str, object], tensors: Mapping[str, torch.Tensor], ctx: BuildContext) -> CausalLM:
    model = resolve(config).build(config, ctx)
    load(model, tensors)
    return model


def run_steps(session: Session, mesh: Mesh, rank: int) -> list[torch.Tensor]:
    """The logits of every step: all tokens of all partitions, first partition first."""
    num_partitions = mesh.sizes.attention_dp
    partition = mesh.index(rank, mesh.axes_of(Group.ATTENTION_DP))
    logits = []
    for number, chunk in enumerate(STEPS):
        chunks = tokens_of(number, chunk)
        parts = [chunks] if num_partitions == 1 else [{s: chunks[s] for s in own if s in chunks} for own in SEQUENCES]
        ids = [token for part in parts for each in part.values() for token in each]
        table = TokenTable.of(mesh, [sum(map(len, part.values())) for part in parts])
        context = session.batch(parts[partition])
        step = StepInput(table, {TOKEN_IDS: torch.tensor(ids)}, np.arange(len(ids)), context)
        with torch.inference_mode():
            logits.append(session.forward.logits(step))
    return logits


def join(rank: int, mesh: Mesh, address: str, solution: str, store: Any = None) -> Recorder:
    """The communicator of a rank."""
    device = torch.get_default_device()
    call = bind("collective", KernelContext(device.type, torch.float32, {"collective": solution})).call
    return Recorder(call(Rendezvous(rank, mesh.world, address, str(device), TIMEOUT_S, store)))


def run_rank(
    config: Mapping[str, object], tensors: Mapping[str, torch.Tensor], mesh: Mesh, cost: CostModel, recorder: Recorder
) -> list[torch.Tensor]:
    """The logits of every step on one rank."""
    ctx = BuildContext(torch.get_default_device().type, torch.float32, mesh=mesh, rank=recorder.rank)
    model = build(config, tensors, ctx)
    return run_steps(Session(model, 4, MAX_LEN, Forward(model, ctx, recorder, cost)), mesh, recorder.rank)


def process_main(
    rank: int, cases: Sequence[tuple[str, str, str]], folder: Path, addresses: Any, solution: str = "gloo"
) -> None:
    """Run (family, mesh, price) after (family, mesh, price), and leave logits and calls in files. addresses: a queue
    for each rank from which it learns where rank 0 waits."""
    torch.set_num_threads(1)
    if solution == "nccl":
        torch.set_default_device(f"cuda:{rank}")
    for family, sizes, price in cases:
        mesh = Mesh.of(MESHES[sizes])
        if rank >= mesh.world:
            continue
        store = None
        if rank == 0:
            store, address = open_store("127.0.0.1:0")
            for other in range(1, mesh.world):
                addresses[other].put(address)
        else:
            address = addresses[rank].get(timeout=TIMEOUT_S)
        recorder = join(rank, mesh, address, solution, store)
        config, tensors = torch.load(folder / f"{family}.pt", map_location="cpu")
        logits = [each.cpu() for each in run_rank(config, tensors, mesh, PRICES[price], recorder)]
        torch.save((logits, recorder.calls), folder / f"{family}-{sizes}-{price}-{rank}.pt")
        recorder.close()
