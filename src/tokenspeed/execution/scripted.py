# SPDX-License-Identifier: Apache-2.0
"""A model without weights that says what it is told, for tests of everything around a model.

The text is chosen above; here a seat's forced ids are returned through the real sampler, planner and seats. A request
without forced ids ends at once, or, where nothing may end it, repeats its prompt.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import numpy as np
import torch

from tokenspeed.core.errors import CheckpointError
from tokenspeed.core.plan import Int32Array, Seating
from tokenspeed.layers.attention import KvSpec
from tokenspeed.layers.decoder import TOKEN_IDS
from tokenspeed.spmd.graph import Graph, Value
from tokenspeed.spmd.step import View


class ScriptedModel:
    """Finds every token equally likely, step_s seconds after it was asked. Keeps nothing in the KV pool."""

    kv_specs: tuple[KvSpec, ...] = ()

    def __init__(self, config: Mapping[str, object], step_s: float) -> None:
        self.vocab_size = _positive(config, "vocab_size")
        self.max_model_len = _positive(config, "max_position_embeddings")
        self._step_s = step_s

    def declare(self, graph: Graph) -> Value:
        return graph.norm("script", graph.source(TOKEN_IDS), run=self._wait)

    def declare_head(self, graph: Graph, hidden: Value) -> Value:
        return graph.head("head", hidden, self.vocab_size, run=self._all_equal)

    def _wait(self, view: View, token_ids_T: torch.Tensor) -> torch.Tensor:
        """(T, 1)."""
        if self._step_s > 0:
            time.sleep(self._step_s)
        return torch.zeros(len(token_ids_T), 1)

    def _all_equal(self, view: View, hidden_S1: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden_S1), self.vocab_size)

    def seating(self, seating: Seating) -> Seating:
        """The same seating with an id for every token that it may generate: forced ids repeat when they run out."""
        sampling = seating.sampling
        num_tokens = min(sampling.max_tokens or self.max_model_len, self.max_model_len)
        forced = self._forced(seating)
        return dataclasses.replace(seating, forced_token_ids=np.resize(forced, num_tokens).astype(np.int32))

    def _forced(self, seating: Seating) -> Int32Array:
        if seating.forced_token_ids is not None and len(seating.forced_token_ids) > 0:
            return seating.forced_token_ids
        if seating.end_token_ids:
            return np.array(seating.end_token_ids[:1], dtype=np.int32)
        return seating.token_ids[: seating.prompt_len]


def _positive(config: Mapping[str, object], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"scripted model: {name} is {value!r}; give a positive integer")
    return value
