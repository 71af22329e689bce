# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that are simple enough to be obviously right: a control plane without pages, a runner without a model, an
engine without a process, a byte-level vocabulary.

They keep the contracts of core/plan.py and core/ipc.py and nothing more.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tokenspeed.checkpoints import (
    GgufVocabulary,
    JsonObject,
    Script,
    ScriptedReply,
    SourceFile,
    TokenizerSource,
    Weights,
)
from tokenspeed.core.ipc import EngineInfo, FromEngine, Progress, Shutdown, Start, StartFailed, ToEngine, Vocabulary
from tokenspeed.core.plan import (
    CacheGroup,
    ControlStats,
    FinishCode,
    GroupKind,
    Int32Array,
    KvEvents,
    RequestKey,
    RowKind,
    Seating,
    SequenceEvents,
    StepPlan,
    StepResult,
)
from tokenspeed.core.request import ContentSpan, Retention, TokenLogprobs
from tokenspeed.engine.cache_watch import CacheWatch
from tokenspeed.engine.channel import Channel, ChannelClosedError
from tokenspeed.engine.step import EngineLoop
from tokenspeed.llm.tokenizer import Tokenizer

EOS, BOS, VOCAB_SIZE = 256, 257, 260
NO_KV_EVENTS = KvEvents(np.zeros((0, 8), np.int64), np.zeros(0, np.int32))


def byte_vocabulary() -> GgufVocabulary:
    """One token a byte, then <eos>, <bos>, <mark> (control) and `a-DEF`, an ordinary token of several characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelled = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in spelled]
    spelled.update({byte: chr(0x100 + rank) for rank, byte in enumerate(others)})
    tokens = (*(spelled[byte] for byte in range(256)), "<eos>", "<bos>", "<mark>", "a-DEF")
    return GgufVocabulary(
        model="gpt2",
        pre="default",
        tokens=tokens,
        scores=(),
        token_types=(1,) * 256 + (3,) * 3 + (1,),
        merges=(),
        bos_id=BOS,
        eos_id=EOS,
        unk_id=None,
        pad_id=None,
        add_bos=True,
        add_eos=False,
        add_space_prefix=False,
    )


def byte_tokenizer() -> Tokenizer:
    """The tokenizer of byte_vocabulary."""
    return Tokenizer.from_source(byte_vocabulary())


@dataclass
class FakeSource:
    """An opened model that has no files."""

    path: Path = Path("fake")
    config: JsonObject = field(default_factory=lambda: {"max_position_embeddings": 512, "vocab_size": VOCAB_SIZE})
    generation_config: JsonObject = field(default_factory=dict)
    tokenizer: TokenizerSource | None = field(default_factory=byte_vocabulary)
    chat_template: str | None = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    script: Script | None = None
    file: SourceFile | None = None

    def weights(self) -> Weights:
        raise NotImplementedError


def script(*replies: tuple[str, str]) -> Script:
    """A script of (match, text) pairs."""
    return Script(tuple(ScriptedReply(match, text) for match, text in replies))


def engine_info(**changes: object) -> EngineInfo:
    """What a small engine says of itself."""
    fields: dict[str, object] = {
        "model_type": "fake",
        "num_parameters": 1,
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "block_size": 16,
        "num_kv_blocks": 32,
        "kv_bytes": 1,
        "max_model_len": 512,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_num_mixed_prefill_tokens": 2048,
        "vocab_size": VOCAB_SIZE,
        "load_s": 0.0,
    }
    return EngineInfo(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass
class _Sequence:
    key: RequestKey
    prompt: list[int]
    max_new_tokens: int
    min_new_tokens: int
    end_token_ids: tuple[int, ...]
    retain: Retention | None = None
    deadline_ms: int | None = None
    seat: int | None = None
    generated: list[int] = field(default_factory=list)
    num_planned: int = 0


@dataclass(frozen=True)
class FakeRefusal:
    """As control.Refusal."""

    key: RequestKey
    needed_tokens: int
    capacity_tokens: int


class FakeControl:
    """Seats requests in order of arrival and decodes all of them in each step. Fits every prompt in one chunk.

    moves: (leases to load, leases to store) of the next plans, which have no rows where nothing runs. holds: what was
    said of ended requests. kv_events: what happens to the prefix index, turn by turn. transfers: what was said of
    leases, and `advance` for each result between them.
    """

    def __init__(self, max_num_seqs: int = 64, capacity_tokens: int = 10_000) -> None:
        self.moves: list[tuple[list[int], list[int]]] = []
        self.kv_events: list[KvEvents] = []
        self.holds: list[tuple[RequestKey, int | None]] = []
        self.transfers: list[tuple[int, bool] | str] = []
        self.submitted: list[dict[str, object]] = []
        self._now_ms = 0
        self._queued: list[_Sequence] = []
        self._live: dict[RequestKey, _Sequence] = {}
        self._seats = list(range(max_num_seqs))[::-1]
        self._plans: dict[int, list[_Sequence]] = {}
        self._ends: list[tuple[RequestKey, FinishCode, int | None]] = []
        self._events: list[tuple[_Sequence, list[int], FinishCode]] = []
        self._capacity_tokens = capacity_tokens
        self.num_steps = 0
        self.seen_keys: list[RequestKey] = []

    def submit(
        self,
        key: RequestKey,
        token_ids: Int32Array,
        *,
        max_new_tokens: int,
        min_new_tokens: int,
        end_token_ids: tuple[int, ...],
        priority: int,
        namespace: str,
        match_limit: int | None,
        adapter: str,
        spans: tuple[ContentSpan, ...],
        retain: Retention | None,
        deadline_ms: int | None,
    ) -> None:
        assert key not in self.seen_keys, f"{key} used twice"
        self.seen_keys.append(key)
        self.submitted.append({"adapter": adapter, "spans": spans, "retain": retain, "deadline_ms": deadline_ms})
        self._queued.append(
            _Sequence(key, token_ids.tolist(), max_new_tokens, min_new_tokens, end_token_ids, retain, deadline_ms)
        )

    def cancel(self, key: RequestKey) -> None:
        self._ends.append((key, FinishCode.CANCELLED, None))

    def finish(self, key: RequestKey, keep_tokens: int) -> None:
        self._ends.append((key, FinishCode.STOP, keep_tokens))

    def retain(self, key: RequestKey, deadline_ms: int) -> None:
        self.holds.append((key, deadline_ms))

    def release(self, key: RequestKey) -> None:
        self.holds.append((key, None))

    def transfer_done(self, lease: int, ok: bool) -> None:
        self.transfers.append((lease, ok))

    def apply(self, now_ms: int) -> list[FakeRefusal]:
        assert now_ms >= self._now_ms
        self._now_ms = now_ms
        refusals = []
        for sequence in self._queued:
            needed = len(sequence.prompt) + 1
            if needed > self._capacity_tokens:
                refusals.append(FakeRefusal(sequence.key, needed, self._capacity_tokens))
            else:
                self._live[sequence.key] = sequence
        ends, self._queued, self._ends = self._ends, [], []
        for key, code, _ in ends:
            self._end(self._live[key], [], code)
        for sequence in list(self._live.values()):
            if sequence.deadline_ms is not None and sequence.deadline_ms <= self._now_ms:
                self._end(sequence, [], FinishCode.DEADLINE)
        return refusals

    def next_plan(self) -> StepPlan | None:
        rows, token_ids, seated, sequences = [], [], [], []
        for sequence in self._live.values():
            if sequence.num_planned >= sequence.max_new_tokens:
                continue
            if sequence.seat is None:
                if not self._seats:
                    continue
                sequence.seat = self._seats.pop()
                seated.append((sequence.seat, sequence.key.index, sequence.key.generation))
                token_ids.extend(sequence.prompt)
                rows.append((sequence.seat, RowKind.PREFILL_LAST, 0, len(sequence.prompt), 0))
            else:
                context_len = len(sequence.prompt) + sequence.num_planned - 1
                rows.append((sequence.seat, RowKind.DECODE, context_len, 1, 0))
            sequence.num_planned += 1
            sequences.append(sequence)
        loads, stores = self.moves.pop(0) if self.moves else ([], [])
        if not rows and not loads and not stores:
            return None
        self.num_steps += 1
        self._plans[self.num_steps] = sequences
        nothing = [np.zeros((0, width), np.int32) for width in (4, 2, 3)]
        moves = [np.array([(lease, 0, 1, 1) for lease in each], np.int32).reshape(-1, 4) for each in (loads, stores)]
        return StepPlan(
            self.num_steps,
            np.array(rows, np.int32).reshape(-1, 5),
            np.array(token_ids, np.int32),
            np.array(seated, np.int32).reshape(-1, 3),
            *nothing,
            *moves,
        )

    def advance(self, result: StepResult) -> None:
        self.transfers.append("advance")
        assert len(result.accepted_offsets) == len(self._plans[result.step_id]) + 1
        for row, sequence in enumerate(self._plans.pop(result.step_id)):
            if sequence.key not in self._live:
                continue
            begin, end = result.accepted_offsets[row], result.accepted_offsets[row + 1]
            token_ids = result.token_ids[begin:end].tolist()
            if result.fault or result.row_faults[row]:
                self._end(sequence, [], FinishCode.FAULT)
                continue
            sequence.generated.extend(token_ids)
            if token_ids[-1] in sequence.end_token_ids and len(sequence.generated) > sequence.min_new_tokens:
                self._end(sequence, token_ids, FinishCode.STOP)
            elif len(sequence.generated) >= sequence.max_new_tokens:
                self._end(sequence, token_ids, FinishCode.LENGTH)
            else:
                self._events.append((sequence, token_ids, FinishCode.NONE))

    def take_events(self) -> SequenceEvents:
        events, self._events = self._events, []
        rows = [(s.key.index, s.key.generation, len(ids), code, 0) for s, ids, code in events]
        token_ids = [token_id for _, ids, _ in events for token_id in ids]
        return SequenceEvents(rows, token_ids)

    def take_kv_events(self) -> KvEvents:
        return self.kv_events.pop(0) if self.kv_events else NO_KV_EVENTS

    def stats(self) -> ControlStats:
        seated = sum(1 for sequence in self._live.values() if sequence.seat is not None)
        waiting = len(self._live) - seated
        return ControlStats(seated, waiting, 0, seated, 0, 64, 0, 0, 0, 0, 0, self.num_steps)

    def _end(self, sequence: _Sequence, token_ids: list[int], code: FinishCode) -> None:
        del self._live[sequence.key]
        if sequence.seat is not None:
            self._seats.append(sequence.seat)
        self._events.append((sequence, token_ids, code))


@dataclass(frozen=True)
class FakePromptLogprobs:
    """As execution.PromptLogprobs."""

    start: int
    entries: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True)
class FakeOutput:
    """As execution.StepOutput."""

    result: StepResult
    logprobs: Sequence[Sequence[TokenLogprobs] | None]
    prompt_logprobs: Sequence[FakePromptLogprobs | None]
    transfers: tuple[tuple[int, bool], ...] = ()


@dataclass
class FakeHandle:
    """A step that has run already, or fails when awaited."""

    output: FakeOutput | None
    runner: FakeRunner
    error: Exception | None = None

    def wait(self) -> FakeOutput:
        self.runner.num_in_flight -= 1
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output


@dataclass
class FakeRunner:
    """Says the forced ids of a seat, else `next_token(seating, number of tokens so far)`.

    faulty: request ids whose rows are faulty. broken: request ids whose step raises. lost: leases whose transfer fails;
    one of `broken` breaks its step. late: leases that end one at each poll; all others end with their step. pace:
    called before each step.
    """

    next_token: Callable[[Seating, int], int] = lambda seating, count: ord("a") + count % 26
    faulty: frozenset[str] = frozenset()
    broken: frozenset[str | int] = frozenset()
    lost: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    pace: Callable[[], None] = lambda: None
    num_in_flight: int = 0
    max_in_flight: int = 0
    seatings: list[Seating] = field(default_factory=list)
    vocabularies: list[Vocabulary] = field(default_factory=list)
    _pending: list[int] = field(default_factory=list)
    _seats: dict[int, Seating] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)

    def launch(self, plan: StepPlan, seatings: Sequence[Seating]) -> FakeHandle:
        self.pace()
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        self.seatings.extend(seatings)
        for seating in seatings:
            self._seats[seating.seat] = seating
            self._counts[seating.seat] = len(seating.token_ids) - seating.prompt_len
        seats = [self._seats[seat] for seat in plan.rows[:, 0].tolist()]
        leases = dict.fromkeys((*plan.load[:, 0].tolist(), *plan.store[:, 0].tolist()))
        if self.broken.intersection((*(seating.request_id for seating in seats), *leases)):
            return FakeHandle(None, self, RuntimeError("the step broke"))
        token_ids = [self._sample(seating) for seating in seats]
        faults = np.array([seating.request_id in self.faulty for seating in seats], np.int32)
        result = StepResult(
            plan.step_id, np.arange(len(seats) + 1, dtype=np.int32), np.array(token_ids, np.int32), faults
        )
        logprobs = [_logprobs(seating, token_id) for seating, token_id in zip(seats, token_ids, strict=True)]
        prompts = [
            _prompt_logprobs(seating) if kind == RowKind.PREFILL_LAST else None
            for seating, kind in zip(seats, plan.rows[:, 1].tolist(), strict=True)
        ]
        self._pending.extend(lease for lease in leases if lease in self.late)
        transfers = tuple((lease, lease not in self.lost) for lease in leases if lease not in self.late)
        return FakeHandle(FakeOutput(result, logprobs, prompts, transfers), self)

    def know(self, vocabulary: Vocabulary) -> None:
        self.vocabularies.append(vocabulary)

    def poll_transfers(self) -> tuple[tuple[int, bool], ...]:
        return ((self._pending.pop(0), True),) if self._pending else ()

    def _sample(self, seating: Seating) -> int:
        count = self._counts[seating.seat]
        self._counts[seating.seat] += 1
        forced = seating.forced_token_ids
        if forced is not None and count < len(forced):
            return int(forced[count])
        return self.next_token(seating, count)


def _logprobs(seating: Seating, token_id: int) -> tuple[TokenLogprobs, ...] | None:
    if seating.sampling.logprobs is None:
        return None
    top = tuple((other, -float(other)) for other in range(1, seating.sampling.logprobs + 1))
    return (TokenLogprobs(token_id, -0.5, 0, top),)


def _prompt_logprobs(seating: Seating) -> FakePromptLogprobs | None:
    if seating.sampling.prompt_logprobs is None:
        return None
    entries = (TokenLogprobs(int(token_id), -1.0, 0) for token_id in seating.token_ids[1 : seating.prompt_len])
    return FakePromptLogprobs(0, (None, *entries))


@dataclass
class FakeMessages:
    """Messages by turn: `turns[i]` arrives in the i-th receive; then nothing more. Keeps what is sent."""

    turns: list[list[ToEngine]]
    sent: list[FromEngine] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        self.waits.append(timeout_s)
        return self.turns.pop(0) if self.turns else []

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


@dataclass
class FakeWorker:
    """Serves a socket as engine.worker.serve does, with FakeControl and a FakeRunner."""

    runner: FakeRunner = field(default_factory=FakeRunner)
    info: EngineInfo = field(default_factory=engine_info)
    fail: StartFailed | None = None
    crash: threading.Event = field(default_factory=threading.Event)
    control: FakeControl = field(default_factory=FakeControl)
    received: list[ToEngine] = field(default_factory=list)

    def __call__(self, sock: socket.socket) -> int:
        channel = Channel(sock)
        try:
            return self._serve(channel)
        except ChannelClosedError:
            return 0
        finally:
            channel.close()

    def _serve(self, channel: Channel) -> int:
        (start,) = channel.receive(10.0)
        assert isinstance(start, Start)
        channel.send(Progress("load", 1, 2, "tensors"))
        if self.fail is not None:
            channel.send(self.fail)
            return 1
        channel.send(self.info)
        loop = EngineLoop(
            self.control,
            self.runner,
            _Recorder(channel, self.received),
            overlap_depth=start.config.scheduler.overlap_depth,
            cache_watch=CacheWatch((CacheGroup(GroupKind.FULL, 16, 32),)) if start.config.cache.events else None,
            heartbeat_s=0.02,
        )
        blocked = True
        while not self.crash.is_set():
            if any(isinstance(message, Shutdown) for message in self.received):
                return 0
            blocked = loop.turn(0.02 if blocked else 0.0)
        return 3


@dataclass
class _Recorder:
    channel: Channel
    received: list[ToEngine]

    def receive(self, timeout_s: float) -> list[ToEngine]:
        messages = self.channel.receive(timeout_s)
        self.received.extend(messages)
        return messages

    def send(self, message: FromEngine) -> None:
        self.channel.send(message)
