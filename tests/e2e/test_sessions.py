# SPDX-License-Identifier: Apache-2.0
"""Agents' sessions through the whole engine on a CPU: a pool too small for them, holds between their turns, forks, and
a host tier from which evicted blocks come back.

A session's turn is its whole history and some new tokens; its answer joins the history. The model is a tiny random
llama, decoded greedily, whose kernels give the same bits however a prompt is cut: so every pool must give equal tokens.
The last block of a history is full only by chance; what it has is computed again with the next turn, in every pool.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import safetensors.numpy
import torch
from numpy.typing import NDArray

from fakes import VOCAB_SIZE, FakeSource, byte_tokenizer
from joined_outputs import joined
from tokenspeed.core.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from tokenspeed.core.ipc import EngineStats
from tokenspeed.core.plan import RowField, RowKind, Seating, StepPlan
from tokenspeed.core.request import FinishReason, Retention, SamplingParams
from tokenspeed.engine.process import InProcessEngine
from tokenspeed.execution import ModelRunner, StepHandle
from tokenspeed.llm.async_llm import AsyncLLM
from tokenspeed.llm.engine_client import EngineClient
from tokenspeed.llm.input_processor import TokensPrompt
from tokenspeed.llm.outputs import RequestOutput
from tokenspeed.transfer import BlockMover, FinishedMove, host

T = TypeVar("T")

NUM_SESSIONS, NUM_TURNS, NUM_FORKS = 16, 6, 4
FORK_AFTER_TURN = 3
BLOCK_SIZE = 8
ANSWER_LEN = 10
CONTEXT_LEN = 512
SHORT_S = 0.2
ROOMY, TIGHT, HOST = 16_384, 1_024, 16_384
"""Tokens of a pool that holds all sessions for good, of one that holds about five of them at their end, of the tier."""


@dataclass(frozen=True)
class Turn:
    """What one turn got."""

    prompt_len: int
    cached_len: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass
class Outcome:
    """What all sessions got from one engine, and the engine's counters when everything had ended.

    num_prefilled: tokens that prefill rows computed, whatever for."""

    turns: dict[tuple[int, int], Turn] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)
    num_prefilled: int = 0

    @property
    def token_ids(self) -> dict[tuple[int, int], tuple[int, ...]]:
        return {name: turn.token_ids for name, turn in self.turns.items()}

    @property
    def num_computed(self) -> dict[tuple[int, int], int]:
        """Prompt tokens of each turn that no cache had."""
        return {name: turn.prompt_len - turn.cached_len for name, turn in self.turns.items()}


GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER_LEN, ignore_eos=True)


class Sessions:
    """All sessions against one engine. The first NUM_FORKS of the others start from the history of session 0."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.outcome = Outcome()
        self._llm = llm
        self._parent: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

    async def run(self) -> Outcome:
        await asyncio.gather(*(self._session(number) for number in range(NUM_SESSIONS)))
        async with asyncio.timeout(5.0):
            while self._llm.stats.num_running or self._llm.stats.num_waiting or self._llm.stats.used_blocks:
                await asyncio.sleep(0.01)
        self.outcome.stats = self._llm.stats
        return self.outcome

    async def _session(self, number: int) -> None:
        dice = random.Random(number)
        is_fork = 1 <= number <= NUM_FORKS
        history = list(await self._parent) if is_fork else []
        for turn in range(NUM_TURNS):
            history += [dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(12, 28))]
            history += await self._turn((number, turn), history)
            if number == 0 and turn + 1 == FORK_AFTER_TURN:
                self._parent.set_result(list(history))
            await self._use_a_tool((number, turn), dice)

    async def _turn(self, name: tuple[int, int], history: list[int]) -> tuple[int, ...]:
        keep = Retention(f"session-{name[0]}", 60.0)
        stream = self._llm.generate(TokensPrompt(history), GREEDY, request_id=_text(name), retain=keep)
        output = joined([output async for output in stream])
        (completion,) = output.outputs
        self.outcome.turns[name] = Turn(len(history), output.cached_len, completion.token_ids, completion.finish_reason)
        return completion.token_ids

    async def _use_a_tool(self, name: tuple[int, int], dice: random.Random) -> None:
        """The hold is prolonged while the tool runs, and let go after the last turn."""
        if name[1] + 1 == NUM_TURNS:
            self._llm.release(_text(name))
            return
        self._llm.retain(_text(name), 30.0)
        await asyncio.sleep(dice.uniform(0.0, 0.05))


def _text(name: tuple[int, int]) -> str:
    return f"session-{name[0]}-turn-{name[1]}"


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two random layers, wide enough that greedy answers differ."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_LEN, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(dict(_tensors()), folder / "model.safetensors")
    return folder


def _tensors() -> Iterator[tuple[str, NDArray[np.float32]]]:
    dice = np.random.default_rng(0)

    def matrix(*shape: int) -> NDArray[np.float32]:
        return (0.4 * dice.standard_normal(shape)).astype(np.float32)

    yield "model.embed_tokens.weight", matrix(VOCAB_SIZE, 32)
    yield "model.norm.weight", np.ones(32, np.float32)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", np.ones(32, np.float32)
        for name, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16), ("o_proj", 32)):
            yield f"{prefix}.self_attn.{name}.weight", matrix(rows, 32)
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}.mlp.{name}.weight", matrix(48, 32)
        yield f"{prefix}.mlp.down_proj.weight", matrix(32, 48)


Scenario = Callable[[AsyncLLM], Coroutine[object, object, T]]


@pytest.fixture(scope="module")
def prefilled() -> Iterator[list[int]]:
    """Tokens that prefill rows computed, by step, from whatever engine runs."""
    launch = ModelRunner.launch
    counts: list[int] = []

    def counting(runner: ModelRunner, plan: StepPlan, seatings: Sequence[Seating]) -> StepHandle:
        is_prefill = plan.rows[:, RowField.KIND] != RowKind.DECODE
        counts.append(int(plan.rows[is_prefill, RowField.QUERY_LEN].sum()))
        return launch(runner, plan, seatings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "launch", counting)
        yield counts


@pytest.fixture(scope="module")
def run(tiny_llama: Path, prefilled: list[int]) -> Callable[..., object]:
    """Runs a scenario on a new engine with this cache."""
    torch.set_num_threads(1)

    async def running(scenario: Scenario[T], config: EngineConfig) -> T:
        client = await EngineClient.start(InProcessEngine, config)
        source = FakeSource(config={"max_position_embeddings": CONTEXT_LEN, "vocab_size": VOCAB_SIZE})
        llm = AsyncLLM(config, source, byte_tokenizer(), client)
        prefilled.clear()  # the warm-up is nobody's prompt
        try:
            async with asyncio.timeout(120.0):
                return await scenario(llm)
        finally:
            await llm.shutdown()

    def run(scenario: Scenario[T], **cache: object) -> T:
        config = EngineConfig(
            model=ModelConfig(model=str(tiny_llama)),
            cache=CacheConfig(block_size=BLOCK_SIZE, **cache),  # type: ignore[arg-type]
            scheduler=SchedulerConfig(max_num_seqs=NUM_SESSIONS, max_num_batched_tokens=256),
            device=DeviceConfig(device="cpu", num_threads=1),
        ).validate()
        return asyncio.run(running(scenario, config))

    return run


@pytest.fixture(scope="module")
def serve(run: Callable[..., Outcome], prefilled: list[int]) -> Callable[..., Outcome]:
    """Runs all sessions on a new engine with this cache."""

    def serve(**cache: object) -> Outcome:
        outcome = run(lambda llm: Sessions(llm).run(), **cache)
        outcome.num_prefilled = sum(prefilled)
        return outcome

    return serve


@pytest.fixture(scope="module")
def roomy(serve: Callable[..., Outcome]) -> Outcome:
    """What a pool that never evicts gives."""
    return serve(kv_tokens=ROOMY)


def test_a_roomy_pool_computes_each_token_of_a_history_once(roomy: Outcome) -> None:
    assert len(roomy.turns) == NUM_SESSIONS * NUM_TURNS
    assert all(turn.finish_reason is FinishReason.LENGTH for turn in roomy.turns.values())
    assert len(set(roomy.token_ids.values())) > NUM_SESSIONS, "answers that are all alike would prove nothing"
    for (session, turn), got in roomy.turns.items():
        if turn > 0:
            before = roomy.turns[session, turn - 1]
            known = before.prompt_len + ANSWER_LEN - 1  # nobody has computed the last token of an answer yet
            assert got.cached_len == known - known % BLOCK_SIZE, (session, turn)
        elif 1 <= session <= NUM_FORKS:
            assert got.cached_len >= roomy.turns[0, FORK_AFTER_TURN - 1].prompt_len - BLOCK_SIZE, "a fork shares"
        else:
            assert got.cached_len == 0
    assert roomy.num_prefilled == sum(roomy.num_computed.values())
    assert (roomy.stats.num_preemptions, roomy.stats.num_held, roomy.stats.used_blocks) == (0, 0, 0)


def test_a_pool_too_small_finishes_everything_alike_and_computes_evicted_tokens_again(
    serve: Callable[..., Outcome], roomy: Outcome
) -> None:
    tight = serve(kv_tokens=TIGHT)
    assert tight.token_ids == roomy.token_ids
    assert sum(tight.num_computed.values()) > sum(roomy.num_computed.values()), "the pool is not too small"
    assert (tight.stats.loaded_tokens, tight.stats.host_total_blocks) == (0, 0)


@pytest.mark.parametrize("host_store", ["seal", "pressure"])
def test_with_a_host_tier_no_prompt_token_is_computed_twice(
    serve: Callable[..., Outcome], roomy: Outcome, host_store: str
) -> None:
    """A preempted request is no new turn; it may compute its last, unfinished block again."""
    tiered = serve(kv_tokens=TIGHT, host_tokens=HOST, host_store=host_store)
    assert tiered.token_ids == roomy.token_ids
    assert tiered.num_computed == roomy.num_computed
    assert tiered.stats.loaded_tokens > 0 and tiered.stats.stored_blocks > 0, "the pool is not too small"
    assert tiered.num_prefilled <= roomy.num_prefilled + BLOCK_SIZE * tiered.stats.num_preemptions
    assert (tiered.stats.num_held, tiered.stats.used_blocks) == (0, 0)
    assert tiered.stats.host_total_blocks == HOST // BLOCK_SIZE
    has_all = tiered.stats.host_used_blocks == roomy.stats.cached_blocks
    assert has_all == (host_store == "seal"), "under pressure only what was evicted is copied"


@pytest.mark.parametrize("host_store", ["seal", "pressure"])
def test_a_host_tier_that_fills_up_loses_blocks_and_nothing_else(
    serve: Callable[..., Outcome], roomy: Outcome, host_store: str
) -> None:
    tiered = serve(kv_tokens=TIGHT, host_tokens=TIGHT // 2, host_store=host_store)
    assert tiered.token_ids == roomy.token_ids
    assert tiered.stats.stored_blocks > 0
    assert tiered.stats.host_used_blocks <= tiered.stats.host_total_blocks == TIGHT // 2 // BLOCK_SIZE


class LateMover:
    """Moves each lease some time after it was asked to, in any order; fails so many of them and tells one in ten
    twice."""

    def __init__(self, mover: BlockMover, failing: float) -> None:
        self._mover = mover
        self._failing = failing
        self._dice = random.Random(0)
        self._waiting: list[tuple[float, int, NDArray[np.int32], NDArray[np.int32]]] = []

    def start(self, load: NDArray[np.int32], store: NDArray[np.int32]) -> None:
        for lease in {*load[:, 0].tolist(), *store[:, 0].tolist()}:
            due = time.monotonic() + self._dice.choice((0.001, 0.003, 0.01))
            self._waiting.append((due, lease, load[load[:, 0] == lease], store[store[:, 0] == lease]))

    def poll(self) -> tuple[FinishedMove, ...]:
        now = time.monotonic()
        due = [each for each in self._waiting if each[0] <= now]
        self._waiting = [each for each in self._waiting if each[0] > now]
        told: list[FinishedMove] = []
        for _, lease, load, store in self._dice.sample(due, len(due)):
            if self._dice.random() < self._failing:
                told.append((lease, False))
                continue
            self._mover.start(load, store)
            told += self._mover.poll() * self._dice.choice((1,) * 9 + (2,))
        return tuple(told)


@pytest.mark.parametrize("host_store", ["seal", "pressure"])
def test_transfers_may_be_late_or_fail(
    serve: Callable[..., Outcome], roomy: Outcome, monkeypatch: pytest.MonkeyPatch, host_store: str
) -> None:
    build = host.build
    monkeypatch.setattr(host, "build", lambda groups: LateMover(build(groups), failing=0.1))
    tiered = serve(kv_tokens=TIGHT, host_tokens=HOST, host_store=host_store)
    assert tiered.token_ids == roomy.token_ids
    assert tiered.stats.loaded_tokens > 0
    assert (tiered.stats.num_held, tiered.stats.used_blocks) == (0, 0)


def test_nobody_else_must_run_for_late_blocks_to_come_back(
    run: Callable[..., tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = host.build
    monkeypatch.setattr(host, "build", lambda groups: LateMover(build(groups), failing=0.0))
    history = _random_ids(200, seed=99)

    async def scenario(llm: AsyncLLM) -> tuple[int, float]:
        await _whole(llm, history)
        for seed in range(20):
            await _whole(llm, _random_ids(100, seed))
        began = time.monotonic()
        return (await _whole(llm, history)).cached_len, time.monotonic() - began

    cached_len, took_s = run(scenario, kv_tokens=TIGHT, host_tokens=HOST)
    assert cached_len == 192, "all full blocks but that of the last token"
    assert took_s < 0.8, "it waited for a heartbeat"


def _random_ids(count: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCAB_SIZE) for _ in range(count)]


async def _whole(llm: AsyncLLM, prompt: Sequence[int], **fields: object) -> RequestOutput:
    stream = llm.generate(TokensPrompt(prompt), GREEDY, **fields)  # type: ignore[arg-type]
    return joined([output async for output in stream])


@pytest.mark.parametrize(
    ("ttl_s", "afterwards", "is_kept"),
    [
        (60.0, None, True),
        (SHORT_S, None, False),
        (SHORT_S, "retain", True),
        (60.0, "release", False),
        (None, None, False),
    ],
)
def test_held_pages_stay_where_others_would_take_them(
    run: Callable[..., bool], ttl_s: float | None, afterwards: str | None, is_kept: bool
) -> None:
    """Twenty strangers want more than the pool has, one after the other. A hold that ran out keeps nothing."""
    history = _random_ids(200, seed=99)

    async def scenario(llm: AsyncLLM) -> bool:
        keep = None if ttl_s is None else Retention("s", ttl_s)
        answer = (await _whole(llm, history, retain=keep, request_id="first")).outputs[0].token_ids
        if afterwards == "retain":
            llm.retain("first", 60.0)
        elif afterwards == "release":
            llm.release("first")
        await asyncio.sleep(0.3 if ttl_s == SHORT_S else 0.0)
        for seed in range(20):
            await _whole(llm, _random_ids(100, seed))
        cached_len = (await _whole(llm, [*history, *answer, 1, 2, 3], retain=keep)).cached_len
        assert cached_len in (0, 208), "all that was computed, or nothing"
        return cached_len > 0

    assert run(scenario, kv_tokens=TIGHT) == is_kept


def test_a_time_limit_ends_a_request_that_waits_and_one_that_runs(run: Callable[..., None]) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)

    async def scenario(llm: AsyncLLM) -> None:
        running = await llm.submit(TokensPrompt([1] * 100), long, timeout_s=0.05)
        waiting = await llm.submit(TokensPrompt([2] * 450), GREEDY, timeout_s=0.01)
        other = await llm.submit(TokensPrompt([3] * 50), GREEDY)
        for stream, limit in ((running, "0.05"), (waiting, "0.01")):
            (completion,) = joined([output async for output in stream]).outputs
            assert completion.finish_reason is FinishReason.ERROR
            assert completion.error == f"the request's time limit of {limit} s passed"
        (completion,) = joined([output async for output in other]).outputs
        assert completion.finish_reason is FinishReason.LENGTH

    run(scenario, kv_tokens=CONTEXT_LEN)
