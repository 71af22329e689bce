# SPDX-License-Identifier: Apache-2.0
"""Builds what execution would build for a model, in the slowest obvious way: batches over random page tables of a
poisoned cache, on torch's default device. Needs no oracle, so that processes of ranks start fast."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tokenspeed.execution.forward import Forward
from tokenspeed.layers.attention import KvSpec
from tokenspeed.layers.build import ONE_RANK, BuildContext
from tokenspeed.layers.decoder import TOKEN_IDS
from tokenspeed.layers.forward_batch import ForwardBatch, GroupTables, KvLayer
from tokenspeed.models import CausalLM, resolve
from tokenspeed.spmd.placement import TokenTable
from tokenspeed.spmd.step import StepInput

BLOCK_SIZE = 8


def build_model(config: Mapping[str, object], overrides: Mapping[str, str] | None = None) -> CausalLM:
    """A model with unset weights, float32 on the CPU."""
    return resolve(config).build(config, BuildContext("cpu", torch.float32, overrides))


def load(model: CausalLM, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill every slot, and assert that nothing is missing, misshapen or left over."""
    unused = set(tensors)
    weight_map = model.weight_map().for_checkpoint(tensors)
    for slot in weight_map:
        name = next(name for name in slot.names if name in tensors)
        assert slot.cut.shape == tensors[name].shape, slot.name
        slot.fill(tensors[name])
        unused.discard(name)
    left_over = [name for name in unused if not weight_map.ignores(name)]
    assert not left_over, left_over


class Session:
    """Sequences of one model, their pages scattered at random over a poisoned cache. Layers of a window have tables of
    their own, from which blocks that no token will look at again are taken, and their pages poisoned."""

    def __init__(self, model: CausalLM, num_sequences: int, max_len: int, forward: Forward | None = None) -> None:
        blocks_each = -(-max_len // BLOCK_SIZE)
        generator = torch.Generator("cpu").manual_seed(3)
        num_pages = num_sequences * blocks_each
        self.windows = sorted({spec.window or 0 for spec in model.kv_specs})
        self.tables = [
            (torch.randperm(num_pages, generator=generator, device="cpu") + 1).view(num_sequences, blocks_each).int()
            for _ in self.windows
        ]
        self.lens = [0] * num_sequences
        self.forward = forward or Forward(model, BuildContext("cpu", torch.float32))
        self.kv_layers = tuple(
            _poisoned(num_pages + 1, spec, self.windows.index(spec.window or 0)) for spec in model.kv_specs
        )

    def step(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Feed each sequence its chunk of token ids; (chunk, V) logits by sequence."""
        starts = [0, *itertools.accumulate(map(len, chunks.values()))]
        tokens = [token for chunk in chunks.values() for token in chunk]
        table = TokenTable.of(ONE_RANK, (len(tokens),))
        step = StepInput(table, {TOKEN_IDS: torch.tensor(tokens)}, np.arange(len(tokens)), self.batch(chunks))
        with torch.inference_mode():
            logits = self.forward.logits(step)
        return {row: logits[starts[index] : starts[index + 1]] for index, row in enumerate(chunks)}

    def batch(self, chunks: Mapping[int, Sequence[int]]) -> ForwardBatch:
        """What attention needs to write these chunks behind what the sequences have, and to look at all of it."""
        positions: list[int] = []
        owners: list[int] = []
        starts = [0]
        for sequence, chunk in chunks.items():
            self._expire(sequence)
            for _ in chunk:
                positions.append(self.lens[sequence])
                owners.append(sequence)
                self.lens[sequence] += 1
            starts.append(len(positions))
        rows = list(chunks)
        return ForwardBatch(
            positions_T=torch.tensor(positions, dtype=torch.int64),
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens_R=torch.tensor([self.lens[row] for row in rows], dtype=torch.int32),
            max_query_len=max((len(chunk) for chunk in chunks.values()), default=0),
            max_seq_len=max((self.lens[row] for row in rows), default=0),
            groups=tuple(
                GroupTables(
                    torch.tensor(
                        [_slot(table[owner], at) for owner, at in zip(owners, positions, strict=True)],
                        dtype=torch.int64,
                    ),
                    table[rows].to(torch.get_default_device()),
                )
                for table in self.tables
            ),
            kv_layers=self.kv_layers,
        )

    def num_holes(self, sequence: int) -> list[int]:
        """Blocks taken out of the sequence's table, a group of layers each."""
        return [int((table[sequence] == 0).sum()) for table in self.tables]

    def _expire(self, sequence: int) -> None:
        """Before a chunk: blocks whose last token is further back than the window of the chunk's first token."""
        for group, window in enumerate(self.windows):
            first_seen = self.lens[sequence] - window + 1 if window else 0
            for index in range(max(0, first_seen) // BLOCK_SIZE):
                page = int(self.tables[group][sequence, index])
                self.tables[group][sequence, index] = 0
                for layer in self.kv_layers:
                    if layer.group == group:
                        layer.k[page], layer.v[page] = float("nan"), float("nan")


def _slot(table: torch.Tensor, position: int) -> int:
    return int(table[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def _poisoned(num_pages: int, spec: KvSpec, group: int) -> KvLayer:
    shape = (num_pages, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    if spec.value_dim is not None:
        latents = torch.full(shape, float("nan"))
        return KvLayer(latents, latents[..., : spec.value_dim], group, v_in_k=True)
    return KvLayer(torch.full(shape, float("nan")), torch.full(shape, float("nan")), group)
