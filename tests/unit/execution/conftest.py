# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints, hand-made plans, and the smallest loop over a real control plane and a real runner."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from tokenspeed.checkpoints import open_model
from tokenspeed.control import ControlPlane
from tokenspeed.core.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from tokenspeed.core.plan import EventField, FinishCode, Int32Array, RequestKey, RowField, Seating, StepPlan
from tokenspeed.core.request import SamplingParams, TokenLogprobs
from tokenspeed.execution import ModelRunner, StepHandle

CONFIG: Mapping[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
GREEDY = SamplingParams(temperature=0.0, seed=0)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny_tensors(config: Mapping[str, object], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of a llama checkpoint with this config, float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ff, vocab = (int(str(config[name])) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden // int(str(config["num_attention_heads"])) * int(str(config["num_key_value_heads"]))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(int(str(config["num_hidden_layers"]))):
        prefix = f"model.layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (ff, hidden),
            f"{prefix}.mlp.up_proj.weight": (ff, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, ff),
        }
    return {
        name: torch.randn(shape, generator=generator) * (0.4 if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
    }


def write_checkpoint(
    folder: Path, config: Mapping[str, object], shards: Sequence[Mapping[str, torch.Tensor]], *, index: bool = False
) -> Path:
    """A Hugging Face folder: one model.safetensors, or numbered shards when there are several."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        safetensors.torch.save_file(dict(tensors), folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def engine_config(path: Path | str, **options: object) -> EngineConfig:
    """One thread and a small pool, unless options say otherwise."""
    load_format = options.get("load_format", "auto")
    return EngineConfig(
        model=ModelConfig(
            model=str(path),
            load_format=load_format,  # type: ignore[arg-type]
            max_model_len=options.get("max_model_len"),  # type: ignore[arg-type]
            dtype=options.get("dtype", "auto"),  # type: ignore[arg-type]
            weights=options.get("weights", "auto"),  # type: ignore[arg-type]
        ),
        cache=CacheConfig(
            kv_tokens=options.get("kv_tokens", 2048),  # type: ignore[arg-type]
            host_tokens=int(str(options.get("host_tokens", 0))),
            block_size=8,
            kv_dtype=options.get("kv_dtype", "auto"),  # type: ignore[arg-type]
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=int(str(options.get("max_num_seqs", 8))),
            max_num_batched_tokens=int(str(options.get("max_num_batched_tokens", 512))),
            overlap_depth=int(str(options.get("overlap_depth", 1))),
        ),
        device=DeviceConfig(device="cpu", num_threads=int(str(options.get("num_threads", 1)))),
    )


def new_runner(config: EngineConfig) -> ModelRunner:
    """A runner of the model that the configuration names."""
    return ModelRunner.create(config, open_model(config.model))


def make_plan(
    step_id: int,
    rows: Sequence[Sequence[int]],
    token_ids: Sequence[int] = (),
    *,
    seated: Sequence[int] = (),
    pages: Sequence[Sequence[int]] = (),
    **moves: Sequence[Sequence[int]],
) -> StepPlan:
    """rows: (seat, kind, context_len, query_len). pages: (seat, block index, page), or with a group behind the seat.
    moves: zero, copy, load and store, as in StepPlan."""

    def array(values: Sequence[Sequence[int]], width: int) -> Int32Array:
        return np.array(values, dtype=np.int32).reshape(-1, width)

    return StepPlan(
        step_id,
        array([[*row, 0] for row in rows], 5),
        np.array(token_ids, dtype=np.int32),
        array([[seat, seat, 0] for seat in seated], 3),
        array([row if len(row) == 4 else (row[0], 0, *row[1:]) for row in pages], 4),
        *(array(moves.get(name, ()), width) for name, width in (("zero", 2), ("copy", 3), ("load", 4), ("store", 4))),
    )


def make_seating(
    seat: int,
    prompt: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    generated: Sequence[int] = (),
    end_token_ids: tuple[int, ...] = (),
    forced: Sequence[int] | None = None,
) -> Seating:
    token_ids = np.array([*prompt, *generated], dtype=np.int32)
    forced_ids = None if forced is None else np.array(forced, dtype=np.int32)
    return Seating(seat, f"request-{seat}", sampling, end_token_ids, token_ids, len(prompt), forced_ids)


@dataclass
class Finished:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    cached_len: int = 0
    finish: FinishCode = FinishCode.NONE


@dataclass
class Wish:
    """A request. arrives: the turn of the loop at which it is submitted."""

    prompt: Sequence[int]
    num_tokens: int = 8
    sampling: SamplingParams = GREEDY
    end_token_ids: tuple[int, ...] = ()
    forced: Sequence[int] | None = None
    arrives: int = 0


class Loop:
    """ControlPlane + ModelRunner, as small as it gets."""

    def __init__(self, config: EngineConfig, runner: ModelRunner | None = None) -> None:
        self.runner = runner or new_runner(config)
        self.depth = config.scheduler.overlap_depth
        info = self.runner.info
        self.control = ControlPlane(
            groups=info.groups,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=info.max_model_len,
        )
        self._generation = 0

    def run(self, wishes: Sequence[Wish]) -> list[Finished]:
        """Serve all of them together."""
        self._generation += 1
        finished = [Finished() for _ in wishes]
        seats: dict[int, int] = {}
        in_flight: deque[tuple[list[int], StepHandle]] = deque()
        turn = 0
        while turn <= max(wish.arrives for wish in wishes) or self.control.has_work():
            for index, wish in enumerate(wishes):
                if wish.arrives == turn:
                    self._submit(index, wish)
            turn += 1
            refusals = self.control.apply()
            assert not refusals, refusals
            plan = self.control.next_plan()
            if plan is not None:
                seatings = []
                for seat, index, _ in plan.seated.tolist():
                    seats[seat] = index
                    seatings.append(_seating(seat, wishes[index], finished[index]))
                owners = [seats[seat] for seat in plan.rows[:, RowField.SEAT].tolist()]
                in_flight.append((owners, self.runner.launch(plan, seatings)))
            if in_flight and (plan is None or len(in_flight) > self.depth):
                self._collect(finished, *in_flight.popleft())
        return finished

    def _submit(self, index: int, wish: Wish) -> None:
        self.control.submit(
            RequestKey(index, self._generation),
            np.array(wish.prompt, dtype=np.int32),
            max_new_tokens=wish.num_tokens,
            min_new_tokens=wish.sampling.min_tokens,
            end_token_ids=wish.end_token_ids,
            match_limit=0 if wish.sampling.prompt_logprobs is not None else None,
        )

    def _collect(self, finished: list[Finished], owners: list[int], handle: StepHandle) -> None:
        output = handle.wait()
        for lease, ok in output.transfers:
            self.control.transfer_done(lease, ok)
        self.control.advance(output.result)
        for index, logprobs, prompt in zip(owners, output.logprobs, output.prompt_logprobs, strict=False):
            if finished[index].finish == FinishCode.NONE:  # a step in flight past the end says nothing
                finished[index].logprobs.extend(logprobs or ())
            if prompt is not None:
                finished[index].prompt_logprobs[prompt.start :] = prompt.entries
        events = self.control.take_events()
        start = 0
        for row in events.rows:
            request = finished[row[EventField.REQUEST_INDEX]]
            end = start + row[EventField.NUM_TOKENS]
            request.token_ids.extend(events.token_ids[start:end])
            request.cached_len = max(request.cached_len, row[EventField.CACHED_LEN])
            request.finish = FinishCode(row[EventField.FINISH])
            start = end

    def close(self) -> None:
        self.runner.close()


def _seating(seat: int, wish: Wish, finished: Finished) -> Seating:
    return make_seating(
        seat,
        wish.prompt,
        wish.sampling,
        generated=finished.token_ids,
        end_token_ids=wish.end_token_ids,
        forced=wish.forced,
    )


class Tools:
    """What tests here are made of; one fixture, so that no test imports another's module."""

    CONFIG = CONFIG
    GREEDY = GREEDY
    Wish = Wish
    Loop = Loop
    tiny_tensors = staticmethod(tiny_tensors)
    write_checkpoint = staticmethod(write_checkpoint)
    engine_config = staticmethod(engine_config)
    new_runner = staticmethod(new_runner)
    make_plan = staticmethod(make_plan)
    make_seating = staticmethod(make_seating)


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    return Tools


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), CONFIG, [tiny_tensors(CONFIG)])


@pytest.fixture
def new_loop(tiny_path: Path) -> Iterator[Callable[..., Loop]]:
    """Loops over the tiny model, closed after the test."""
    loops: list[Loop] = []

    def make(path: Path | str = tiny_path, **options: object) -> Loop:
        loops.append(Loop(engine_config(path, **options)))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()
