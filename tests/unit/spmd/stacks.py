# SPDX-License-Identifier: Apache-2.0
"""Abstract dense, MoE and MLA models: declarations, weights with shards, maths of each op and an unsharded reference.

The dimensions follow the mesh, so that every size divides; the maths is plain numpy in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tokenspeed.spmd import shards
from tokenspeed.spmd.graph import Graph, Value
from tokenspeed.spmd.interpreter import Array, Exchanging, Maths
from tokenspeed.spmd.mesh import Group, GroupSizes, Mesh
from tokenspeed.spmd.placement import TokenTable
from tokenspeed.spmd.shards import Shards
from tokenspeed.spmd.step import StepInput, View

WIDTH, HEAD, LATENT = 4, 2, 3


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True)
class Batch:
    """Token ids and the sequence of each row of the canonical table; sequences stay in one attention partition."""

    table: TokenTable
    ids: Array
    sequences: np.ndarray
    sampled: np.ndarray

    @classmethod
    def of(cls, mesh: Mesh, counts: tuple[int, ...], vocab_size: int, seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        table = TokenTable(mesh, counts)
        total = table.num_tokens
        partition = np.repeat(np.arange(mesh.sizes.attention_dp), table.partition_counts())
        sequences = partition * 2 + np.sort(rng.integers(0, 2, total)) if total else partition
        sampled = np.flatnonzero(rng.random(total) < 0.5)
        return cls(table, rng.integers(0, vocab_size, (total, 1)).astype(np.float64), sequences, sampled)

    def step(self) -> StepInput:
        return StepInput(self.table, {"ids": self.ids}, self.sampled)


def normed(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def heads_of(x: Array) -> Array:
    return x.reshape(len(x), x.shape[1] // HEAD, HEAD)


def attend(q: Array, k: Array, v: Array, sequences: np.ndarray) -> Array:
    """Causal attention inside each sequence; q (T, H, K), k and v (T, G, K)."""
    repeats = q.shape[1] // k.shape[1]
    scores = np.einsum("thk,shk->hts", q, np.repeat(k, repeats, axis=1))
    allowed = (sequences[:, None] == sequences[None, :]) & np.tri(len(sequences), dtype=bool)
    scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e300))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shk->thk", weights, np.repeat(v, repeats, axis=1)).reshape(len(q), q.shape[1] * HEAD)


def gated(x: Array, up: Array, down: Array) -> Array:
    """A feed-forward block that is not linear in x; up (F, D), down (D, F)."""
    inner = x @ up.T
    return (inner * np.tanh(inner)) @ down.T


def routing(scores: Array, top_k: int) -> Array:
    """(T, E) weights of the top_k experts, zero elsewhere."""
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :top_k]
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, order, np.exp(np.take_along_axis(scores, order, axis=-1)), axis=-1)
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)


def routed(x: Array, weights: Array, up: Array, down: Array) -> Array:
    """Experts up (E, F, D) and down (E, D, F) on all rows with weights (T, E)."""
    out = np.zeros_like(x)
    for expert in range(len(up)):
        out += weights[:, expert : expert + 1] * gated(x, up[expert], down[expert])
    return out


class Stack:
    """A declared model on a mesh. `forward` is the reference; `maths` is what the interpreter runs."""

    def __init__(self, mesh: Mesh, seed: int = 0) -> None:
        self.mesh = mesh
        self.graph = Graph()
        self.maths = self.graph.maths
        self.full: dict[str, Array] = {}
        self.shards: dict[str, Shards] = {}
        self.local: list[dict[str, Array]] = [{} for _ in range(mesh.world)]
        self.vocab_size = 2 * mesh.sizes.dense_tp
        self.num_experts = 2 * mesh.sizes.ep
        self.top_k = 1 if mesh.sizes.ep % 2 else 2
        self.batch: Batch | None = None
        self._rng = np.random.default_rng(seed)
        self._reference: list[tuple[str, tuple[Value, ...], tuple[Value, ...], Callable[..., object]]] = []

    def weight(self, name: str, shape: tuple[int, ...], dealt: Shards = shards.WHOLE) -> None:
        dealt.check(name, shape, self.mesh)
        self.full[name] = self._rng.normal(size=shape) / np.sqrt(shape[-1])
        self.shards[name] = dealt
        for rank, local in enumerate(self.local):
            local[name] = dealt.cut(self.full[name], self.mesh, rank)  # type: ignore[assignment]

    def sequences(self, rows: np.ndarray) -> np.ndarray:
        assert self.batch is not None
        return self.batch.sequences[rows]

    def _bind(self, name: str, ins: tuple[Value, ...], outs: tuple[Value, ...], run: Maths, whole: Callable) -> None:  # type: ignore[type-arg]
        self.maths[name] = run
        self._reference.append((name, ins, outs, whole))

    # Ops: what runs on a rank, and the unsharded maths written beside it.

    def embed(self, ids: Value) -> Value:
        self.weight("embed", (self.vocab_size, WIDTH), shards.rows(Group.DENSE))
        x = self.graph.embed("embed", ids, WIDTH)

        def run(view: View, ids: Array) -> Array:
            table = self.local[view.rank]["embed"]
            places = ids[:, 0].astype(int) - view.index(Group.DENSE) * len(table)
            mine = (places >= 0) & (places < len(table))
            return np.where(mine[:, None], table[np.where(mine, places, 0)], 0.0)

        self._bind("embed", (ids,), (x,), run, lambda ids: self.full["embed"][ids[:, 0].astype(int)])
        return x

    def add_norm(self, name: str, x: Value, residual: Value | None) -> tuple[Value, Value]:
        def maths(*terms: Array) -> tuple[Array, Array]:
            stream = terms[0] if len(terms) == 1 else terms[0] + terms[1]
            return normed(stream), stream

        outs = self.graph.add_norm(name, x, residual)
        ins = (x,) if residual is None else (x, residual)
        self._bind(name, ins, outs, lambda _, *terms: maths(*terms), maths)
        return outs

    def norm(self, name: str, x: Value) -> Value:
        out = self.graph.norm(name, x)
        self._bind(name, (x,), (out,), lambda _, x: normed(x), normed)
        return out

    def add(self, name: str, *terms: Value) -> Value:
        out = self.graph.add(name, *terms)
        self._bind(name, terms, (out,), lambda _, *terms: sum(terms), lambda *terms: sum(terms))
        return out

    def project(self, name: str, x: Value, width: int) -> Value:
        self.weight(name, (width, x.width))
        out = self.graph.project(name, x, width)
        self._bind(name, (x,), (out,), lambda view, x: x @ self.full[name].T, lambda x: x @ self.full[name].T)
        return out

    def attention(self, name: str, x: Value) -> Value:
        """Grouped-query attention with a bias after the output projection; K/V heads are shared on even meshes."""
        num_heads = 2 * self.mesh.sizes.attention_tp
        num_kv_heads = num_heads // 4 if num_heads % 4 == 0 else num_heads
        self.weight(f"{name}.q", (num_heads * HEAD, WIDTH), shards.rows(Group.ATTENTION, HEAD))
        for part in ("k", "v"):
            dealt = shards.rows(Group.ATTENTION, HEAD, shared=True)
            self.weight(f"{name}.{part}", (num_kv_heads * HEAD, WIDTH), dealt)
        self.weight(f"{name}.out", (WIDTH, num_heads * HEAD), shards.columns(Group.ATTENTION, HEAD))
        self.weight(f"{name}.bias", (WIDTH,), shards.once(Group.ATTENTION))
        out = self.graph.attention(name, x, width=WIDTH)

        def maths(weights: dict[str, Array], sequences: np.ndarray, x: Array) -> Array:
            q, k, v = (heads_of(x @ weights[f"{name}.{part}"].T) for part in "qkv")
            return attend(q, k, v, sequences) @ weights[f"{name}.out"].T + weights[f"{name}.bias"]

        def run(view: View, x: Array) -> Array:
            return maths(self.local[view.rank], self.sequences(view.rows), x)

        self._bind(name, (x,), (out,), run, lambda x: maths(self.full, self.sequences(np.arange(len(x))), x))
        return out

    def latent_attention(self, name: str, x: Value) -> Value:
        """Low-rank projections that every rank has, then heads over the attention group."""
        num_heads = self.mesh.sizes.attention_tp
        q = self.norm(f"{name}.q_norm", self.project(f"{name}.q_down", x, LATENT))
        kv = self.norm(f"{name}.kv_norm", self.project(f"{name}.kv_down", x, LATENT))
        for part in ("q_up", "k_up", "v_up"):
            self.weight(f"{name}.{part}", (num_heads * HEAD, LATENT), shards.rows(Group.ATTENTION, HEAD))
        self.weight(f"{name}.out", (WIDTH, num_heads * HEAD), shards.columns(Group.ATTENTION, HEAD))
        out = self.graph.attention(name, q, kv, width=WIDTH)

        def maths(weights: dict[str, Array], sequences: np.ndarray, q: Array, kv: Array) -> Array:
            q_heads, k, v = (
                heads_of(latent @ weights[f"{name}.{part}"].T)
                for latent, part in ((q, "q_up"), (kv, "k_up"), (kv, "v_up"))
            )
            return attend(q_heads, k, v, sequences) @ weights[f"{name}.out"].T

        def run(view: View, q: Array, kv: Array) -> Array:
            return maths(self.local[view.rank], self.sequences(view.rows), q, kv)

        self._bind(
            name, (q, kv), (out,), run, lambda *ins: maths(self.full, self.sequences(np.arange(len(ins[0]))), *ins)
        )
        return out

    def feed_forward(self, name: str, x: Value, over: Group = Group.DENSE) -> Value:
        inner = 2 * self.mesh.size_of(self.mesh.axes_of(over))
        self.weight(f"{name}.up", (inner, WIDTH), shards.rows(over))
        self.weight(f"{name}.down", (WIDTH, inner), shards.columns(over))
        out = self.graph.feed_forward(name, x, over)

        def maths(weights: dict[str, Array], x: Array) -> Array:
            return gated(x, weights[f"{name}.up"], weights[f"{name}.down"])

        self._bind(name, (x,), (out,), lambda view, x: maths(self.local[view.rank], x), lambda x: maths(self.full, x))
        return out

    def experts(self, name: str, x: Value, *, all_to_all: bool = True) -> Value:
        inner = self.mesh.sizes.moe_tp
        scores = self.project(f"{name}.router", x, self.num_experts)
        self.weight(f"{name}.up", (self.num_experts, inner, WIDTH), shards.stacked(1))
        self.weight(f"{name}.down", (self.num_experts, WIDTH, inner), shards.stacked(2))
        out = self.graph.experts(name, x, scores, self.top_k, all_to_all=all_to_all)

        def run(view: View, x: Array, scores: Array) -> Array | Exchanging:
            up, down = (self.local[view.rank][f"{name}.{part}"] for part in ("up", "down"))
            weights = routing(scores, self.top_k)
            if view.exchanges():
                return self._dispatched(view, x, weights, (up, down))
            first = view.index(Group.EP) * len(up)
            return routed(x, weights[:, first : first + len(up)], up, down)

        def whole(x: Array, scores: Array) -> Array:
            weights = routing(scores, self.top_k)
            return routed(x, weights, self.full[f"{name}.up"], self.full[f"{name}.down"])

        self._bind(name, (x, scores), (out,), run, whole)
        return out

    def _dispatched(self, view: View, x: Array, weights: Array, experts: tuple[Array, Array]) -> Exchanging:
        """Rows travel to the ranks of their experts and back."""
        here = len(experts[0])
        parts = np.split(weights, view.size(Group.EP), axis=1)
        chosen = [np.flatnonzero(part.any(axis=1)) for part in parts]
        sent = [np.hstack((x[rows], part[rows])) for rows, part in zip(chosen, parts, strict=True)]
        arrived = yield view.exchange(0, sent)
        done = [routed(each[:, :-here], each[:, -here:], *experts) for each in arrived]
        returned = yield view.exchange(1, done)
        out = np.zeros_like(x)
        for rows, back in zip(chosen, returned, strict=True):
            out[rows] += back
        return out

    def select(self, x: Value) -> Value:
        out = self.graph.select("select", x)

        def run(view: View, x: Array) -> Array:
            assert self.batch is not None
            return x[np.isin(view.rows, self.batch.sampled)]

        self._bind("select", (x,), (out,), run, lambda x: x[self.batch.sampled])  # type: ignore[union-attr]
        return out

    def head(self, x: Value) -> Value:
        self.weight("head", (self.vocab_size, WIDTH), shards.rows(Group.DENSE))
        out = self.graph.head("head", x, self.vocab_size)

        def run(view: View, x: Array) -> Exchanging | Array:
            mine = x @ self.local[view.rank]["head"].T
            return self._gathered(view, mine) if view.exchanges() else mine

        self._bind("head", (x,), (out,), run, lambda x: x @ self.full["head"].T)
        return out

    def _gathered(self, view: View, columns: Array) -> Exchanging:
        parts = yield view.exchange(0, [columns] * view.size(Group.DENSE))
        return np.hstack(parts)

    def output(self, name: str, x: Value) -> None:
        self.graph.output(name, x)
        self._reference.append((name, (x,), (), lambda x: x))

    def finish(self, x: Value, residual: Value) -> None:
        """The last norm and the head."""
        x, _ = self.add_norm("norm", x, residual)
        self.output("logits", self.head(self.select(x)))

    def forward(self, batch: Batch) -> dict[str, Array]:
        """The outputs by name, unsharded, op after op."""
        self.batch = batch
        values: dict[int, Array] = {self.graph.values[0].index: batch.ids}
        outputs: dict[str, Array] = {}
        for name, ins, outs, whole in self._reference:
            result = whole(*(values[value.index] for value in ins))
            if not outs:
                outputs[name] = result  # type: ignore[assignment]
                continue
            for value, array in zip(outs, result if isinstance(result, tuple) else (result,), strict=True):
                values[value.index] = array  # type: ignore[assignment]
        return outputs


def dense(mesh: Mesh, num_layers: int = 2) -> Stack:
    """A pre-norm decoder."""
    stack = Stack(mesh)
    x, residual = stack.embed(stack.graph.source("ids")), None
    for index in range(num_layers):
        x, residual = stack.add_norm(f"layers.{index}.input_norm", x, residual)
        x = stack.attention(f"layers.{index}.attention", x)
        x, residual = stack.add_norm(f"layers.{index}.post_norm", x, residual)
        x = stack.feed_forward(f"layers.{index}.mlp", x)
    assert residual is not None
    stack.finish(x, residual)
    return stack


def sandwich(mesh: Mesh) -> Stack:
    """Each branch is closed by a norm of its own before it joins the residual stream."""
    stack = Stack(mesh)
    x, residual = stack.add_norm("layers.0.input_norm", stack.embed(stack.graph.source("ids")), None)
    x = stack.norm("layers.0.post_attention_norm", stack.attention("layers.0.attention", x))
    x, residual = stack.add_norm("layers.0.pre_mlp_norm", x, residual)
    x = stack.norm("layers.0.post_mlp_norm", stack.feed_forward("layers.0.mlp", x))
    stack.finish(x, residual)
    return stack


def moe(mesh: Mesh) -> Stack:
    """Routed experts alone."""
    stack = Stack(mesh)
    x, residual = stack.embed(stack.graph.source("ids")), None
    for index in range(2):
        x, residual = stack.add_norm(f"layers.{index}.input_norm", x, residual)
        x = stack.attention(f"layers.{index}.attention", x)
        x, residual = stack.add_norm(f"layers.{index}.post_norm", x, residual)
        x = stack.experts(f"layers.{index}.experts", x, all_to_all=index == 0)
    assert residual is not None
    stack.finish(x, residual)
    return stack


def mixed(mesh: Mesh) -> Stack:
    """A dense layer, then experts with a shared one beside them; the residual stream between is tapped."""
    stack = Stack(mesh)
    x, residual = stack.add_norm("layers.0.input_norm", stack.embed(stack.graph.source("ids")), None)
    x = stack.attention("layers.0.attention", x)
    x, residual = stack.add_norm("layers.0.post_norm", x, residual)
    x = stack.feed_forward("layers.0.mlp", x)
    x, residual = stack.add_norm("layers.1.post_norm", x, residual)
    stack.output("tap", residual)
    shared = stack.feed_forward("layers.1.shared", x, Group.DENSE)
    x = stack.add("layers.1.sum", stack.experts("layers.1.experts", x), shared)
    stack.finish(x, residual)
    return stack


def mla(mesh: Mesh) -> Stack:
    """Latent attention, then experts with a shared one that is split as they are."""
    stack = Stack(mesh)
    x, residual = stack.add_norm("layers.0.input_norm", stack.embed(stack.graph.source("ids")), None)
    x = stack.latent_attention("layers.0.attention", x)
    x, residual = stack.add_norm("layers.0.post_norm", x, residual)
    shared = stack.feed_forward("layers.0.shared", x, Group.MOE)
    x = stack.add("layers.0.sum", stack.experts("layers.0.experts", x), shared)
    stack.finish(x, residual)
    return stack


STACKS: dict[str, Callable[[Mesh], Stack]] = {
    "dense": dense,
    "sandwich": sandwich,
    "moe": moe,
    "mixed": mixed,
    "mla": mla,
}


def every_sizes(num_ranks_max: int = 16) -> Iterator[GroupSizes]:
    """All group sizes of at most so many ranks whose products divide; not all of them form a chain."""
    for world in range(1, num_ranks_max + 1):
        for attention_tp in divisors(world):
            for dense_tp in divisors(world):
                for moe_tp in divisors(world):
                    for ep in divisors(world // moe_tp):
                        yield GroupSizes(attention_tp, world // attention_tp, dense_tp, moe_tp, ep)
