# SPDX-License-Identifier: Apache-2.0
"""Updates become text: UTF-8 across tokens, stop strings, log-probabilities that add up, merging, ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from fakes import EOS, FakeSource, byte_tokenizer, engine_info
from joined_outputs import joined
from tokenspeed.core.config import EngineConfig
from tokenspeed.core.errors import EngineDeadError
from tokenspeed.core.request import FinishReason, SamplingParams, SequenceUpdate, TokenLogprobs
from tokenspeed.llm.input_processor import InputProcessor, TextPrompt
from tokenspeed.llm.output_processor import RequestStream
from tokenspeed.llm.outputs import CompletionOutput, RequestOutput

MARK, LONG = 258, 259
TOKENIZER = byte_tokenizer()


@dataclass
class Harness:
    """A stream, and what it asked of the engine."""

    params: SamplingParams
    finished: list[tuple[str, int]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = InputProcessor(FakeSource(), TOKENIZER, engine_info(), EngineConfig()).process(
            TextPrompt("p"), self.params, request_id="r"
        )
        self.ids = [sequence.request_id for sequence in request.sequences]
        self.stream = RequestStream(
            "r",
            request,
            TOKENIZER,
            finish=lambda request_id, keep: self.finished.append((request_id, keep)),
            cancel=self.cancelled.append,
        )

    def push(self, token_ids: Sequence[int], *, index: int = 0, finish: FinishReason | None = None) -> None:
        ended = finish is FinishReason.STOP
        entries = tuple(TokenLogprobs(token_id, -0.25, 0, ((token_id, -0.25), (65, -9.0))) for token_id in token_ids)
        self.stream.push(
            SequenceUpdate(
                request_id=self.ids[index],
                token_ids=tuple(token_ids),
                logprobs=None if self.params.logprobs is None else entries,
                finish_reason=finish,
                end_token_id=token_ids[-1] if ended else None,
            )
        )


def drain(stream: RequestStream) -> list[RequestOutput]:
    async def run() -> list[RequestOutput]:
        return [output async for output in stream]

    return asyncio.run(asyncio.wait_for(run(), 5.0))


def drain_whole(stream: RequestStream) -> RequestOutput:
    return asyncio.run(asyncio.wait_for(stream.whole(), 5.0))


def run(text: bytes, chunk: int, *, finish: FinishReason = FinishReason.STOP, **fields: object) -> CompletionOutput:
    """Feed one token a byte, `chunk` at a time, until all is said or a stop string ends it."""
    harness = Harness(SamplingParams(**fields))  # type: ignore[arg-type]
    ids = [*text, EOS] if finish is FinishReason.STOP else [*text]
    for begin in range(0, len(ids), chunk):
        piece = ids[begin : begin + chunk]
        last = begin + chunk >= len(ids)
        harness.push(piece, finish=finish if last else None)
        if harness.finished:
            break
    (completion,) = joined(drain(harness.stream)).outputs
    return completion


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_text_is_whole_however_it_comes(chunk: int) -> None:
    completion = run("naïve 🧪 東京".encode(), chunk)
    assert completion.text == "naïve 🧪 東京"
    assert completion.finish_reason is FinishReason.STOP and completion.stop_reason is None
    assert completion.num_tokens == len("naïve 🧪 東京".encode()) + 1
    assert completion.token_ids[-1] == EOS


def test_what_never_became_utf8_is_told_as_such() -> None:
    assert run(b"ab\xf0\x9f", 1, finish=FinishReason.LENGTH).text == "ab\ufffd"


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_a_stop_string_never_leaks_and_ends_the_request(chunk: int) -> None:
    harness = Harness(SamplingParams(stop=("DEFGHIJ",)))
    seen: list[str] = []

    async def consume() -> None:
        async for output in harness.stream:
            seen.append(output.outputs[0].text)

    async def feed() -> None:
        consumer = asyncio.create_task(consume())
        data = [*b"alpha-DEFGHIJ-omega"]
        for begin in range(0, len(data), chunk):
            harness.push(data[begin : begin + chunk])
            await asyncio.sleep(0)
            if harness.finished:
                break
        await consumer

    asyncio.run(asyncio.wait_for(feed(), 5.0))
    assert "".join(seen) == "alpha-"
    assert harness.finished == [(harness.ids[0], len("alpha-DEFGHIJ"))]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_near_miss_arrives_whole(chunk: int) -> None:
    completion = run(b"alpha-DEFGHIX-omegaDEF", chunk, stop=("DEFGHIJ",))
    assert completion.text == "alpha-DEFGHIX-omegaDEF" and completion.stop_reason is None


def test_a_match_is_told_and_what_comes_after_does_not_count() -> None:
    completion = run(b"one two three", 100, stop=("two",))
    assert (completion.text, completion.stop_reason) == ("one ", "two")
    assert completion.num_tokens == len("one two") == len(completion.token_ids)
    assert run(b"one two three", 3, stop=("two",), include_stop_str_in_output=True).text == "one two"


def test_stop_strings_wait_for_min_tokens() -> None:
    assert run(b"xx-xx-", 1, stop=("xx",), min_tokens=3).text == "xx-"


def test_a_stop_token_is_the_stop_reason_and_is_shown_only_on_request() -> None:
    def ended(**fields: object) -> CompletionOutput:
        harness = Harness(SamplingParams(stop_token_ids=(33,), **fields))  # type: ignore[arg-type]
        harness.push([*b"ab!"], finish=FinishReason.STOP)
        return joined(drain(harness.stream)).outputs[0]

    assert (ended().text, ended().stop_reason, ended().num_tokens) == ("ab", 33, 3)
    assert ended(include_stop_str_in_output=True).text == "ab!"


def test_special_tokens_are_skipped_or_shown() -> None:
    for skip, text in ((True, "ab"), (False, "a<mark>b")):
        harness = Harness(SamplingParams(skip_special_tokens=skip))
        harness.push([97, MARK, 98, EOS], finish=FinishReason.STOP)
        assert joined(drain(harness.stream)).outputs[0].text == text


def entry_bytes(completion: CompletionOutput) -> bytes:
    assert completion.logprobs is not None
    return b"".join(entry.token.bytes for entry in completion.logprobs)


@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
def test_logprob_bytes_are_the_text(chunk: int) -> None:
    completion = run("é 🧪!".encode(), chunk, logprobs=3)
    assert completion.logprobs is not None
    assert entry_bytes(completion) == completion.text.encode() == "é 🧪!".encode()
    assert len(completion.logprobs) == completion.num_tokens - 1
    assert all(entry.token.bytes != "\ufffd".encode() for entry in completion.logprobs)
    assert all(0 >= top.logprob > float("-inf") for entry in completion.logprobs for top in entry.top)


def test_logprobs_of_a_cut_text_are_cut_with_it() -> None:
    for chunk in (1, 3, 100):
        completion = run("añb STOP c".encode(), chunk, logprobs=0, stop=("STOP",))
        assert entry_bytes(completion) == completion.text.encode() == "añb ".encode()


def test_a_cut_inside_a_token_cuts_its_entry() -> None:
    """`a-DEF` holds the begin of the stop string: only `a-` is said, by text and entries alike."""
    harness = Harness(SamplingParams(logprobs=0, stop=("DEFG",)))
    for token_id in (120, LONG, 71):
        harness.push([token_id])
    assert harness.finished == [(harness.ids[0], 3)]
    (completion,) = joined(drain(harness.stream)).outputs
    assert completion.text == "xa-" and entry_bytes(completion) == b"xa-"


def test_a_skipped_token_has_an_entry_without_bytes() -> None:
    harness = Harness(SamplingParams(logprobs=0))
    harness.push([97, MARK, 98, MARK, EOS], finish=FinishReason.STOP)
    (completion,) = joined(drain(harness.stream)).outputs
    assert completion.text == "ab" and entry_bytes(completion) == b"ab"
    assert completion.logprobs is not None
    assert [entry.token.text for entry in completion.logprobs] == ["a", "<mark>", "b", "<mark>"]


def test_minus_infinity_is_told_as_a_number() -> None:
    harness = Harness(SamplingParams(logprobs=1))
    entry = TokenLogprobs(97, -0.0, 0, ((98, float("-inf")),))
    harness.stream.push(
        SequenceUpdate(request_id=harness.ids[0], token_ids=(97,), logprobs=(entry,), finish_reason=FinishReason.LENGTH)
    )
    (completion,) = drain(harness.stream)[-1].outputs
    assert completion.logprobs is not None and completion.logprobs[0].top[0].logprob == -9999.0


def test_deltas_stay_in_step_over_random_chunks() -> None:
    """Law: after each output, text so far and entries so far agree, whatever the chunks and the stop strings."""
    rng = random.Random(7)
    for _ in range(200):
        text = "".join(rng.choice(["a", "b", "é", "🧪", "ab", "東"]) for _ in range(rng.randrange(1, 20)))
        stops = tuple({"".join(rng.choice("abé") for _ in range(rng.randrange(1, 4))) for _ in range(2)})
        completion = run(text.encode(), rng.randrange(1, 6), logprobs=1, stop=stops)
        cut = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
        whole = text if cut is None else text[:cut]
        assert whole.startswith(completion.text)
        assert entry_bytes(completion) == completion.text.encode()


def test_n_sequences_are_one_stream_and_a_slow_consumer_gets_them_merged() -> None:
    harness = Harness(SamplingParams(n=2))
    for _ in range(3):
        harness.push([*b"ab"])
        harness.push([*b"xy"], index=1)
    harness.push([EOS], finish=FinishReason.STOP)
    harness.push([*b"z"], index=1, finish=FinishReason.LENGTH)
    (output,) = drain(harness.stream)
    assert [(each.text, each.finish_reason) for each in output.outputs] == [
        ("ababab", FinishReason.STOP),
        ("xyxyxyz", FinishReason.LENGTH),
    ]
    assert output.finished and output.times.first_token is not None and output.times.finished is not None


def test_closing_cancels_what_still_runs() -> None:
    harness = Harness(SamplingParams(n=3))
    harness.push([97, EOS], index=1, finish=FinishReason.STOP)
    harness.stream.close()
    assert harness.cancelled == [harness.ids[0], harness.ids[2]]
    assert drain(harness.stream) == []


def test_a_dead_engine_is_told_after_what_came() -> None:
    harness = Harness(SamplingParams())
    harness.push([97])
    harness.stream.fail(EngineDeadError("gone"))
    seen: list[str] = []

    async def consume() -> None:
        async for output in harness.stream:
            seen.append(output.outputs[0].text)

    with pytest.raises(EngineDeadError, match="gone"):
        asyncio.run(consume())
    assert seen == ["a"]


def test_times_say_when_the_first_step_began() -> None:
    harness = Harness(SamplingParams())
    assert harness.stream.times.started is None
    harness.stream.push(SequenceUpdate(request_id=harness.ids[0], queue_s=0.25))
    times = harness.stream.times
    assert times.started == times.arrived + 0.25, "known while there are no tokens"
    assert times.first_token is None
    harness.stream.push(SequenceUpdate(request_id=harness.ids[0], queue_s=9.0))
    harness.stream.push(
        SequenceUpdate(request_id=harness.ids[0], token_ids=(97, 98), finish_reason=FinishReason.LENGTH)
    )
    (output,) = drain(harness.stream)
    assert output.times.started == output.times.arrived + 0.25
    assert output.outputs[0].token_ids == (97, 98), "the beginning is no output of its own"


@pytest.mark.parametrize("seed", range(20))
def test_text_taken_past_the_iteration_is_missing_from_it_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice(["ab", "é", "東", "🧪", " ", "\n"]) for _ in range(60))
    harness = Harness(SamplingParams())
    data, seen, num_tokens = [*text.encode()], [], []

    async def consume() -> None:
        while True:
            plain = await harness.stream.wait_for_text()
            if plain is not None and rng.random() < 0.7:
                seen.append(plain)
                num_tokens.append(harness.stream.take_text())
                continue
            async for output in harness.stream:
                seen.append(output.outputs[0].text)
                num_tokens.append(output.outputs[0].num_tokens)
                if output.finished:
                    return
                break

    async def produce() -> None:
        while data:
            size = rng.randint(1, 5)
            harness.stream.push_tokens(harness.ids[0], data[:size])
            del data[:size]
            if rng.random() < 0.8:
                await asyncio.sleep(0)
        harness.push([EOS], finish=FinishReason.STOP)

    async def both() -> None:
        await asyncio.wait_for(asyncio.gather(consume(), produce()), 5.0)

    asyncio.run(both())
    assert "".join(seen) == text
    assert num_tokens == sorted(num_tokens) and num_tokens[-1] == len(text.encode()) + 1


def test_there_is_more_than_text_to_several_sequences_log_probabilities_and_ends() -> None:
    for params in (SamplingParams(n=2), SamplingParams(logprobs=0)):
        harness = Harness(params)
        harness.push([65])
        assert asyncio.run(harness.stream.wait_for_text()) is None
    harness = Harness(SamplingParams())
    harness.push([65], finish=FinishReason.LENGTH)
    assert asyncio.run(harness.stream.wait_for_text()) is None
    broken = Harness(SamplingParams())
    broken.stream.fail(EngineDeadError("gone"))
    assert asyncio.run(broken.stream.wait_for_text()) is None


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": ("cd",)}, {"logprobs": 1}])
def test_a_whole_output_is_what_its_parts_make(fields: dict[str, object]) -> None:
    def pushed() -> RequestStream:
        harness = Harness(SamplingParams(**fields))  # type: ignore[arg-type]
        for index in range(len(harness.ids)):
            for token_id in b"ab":
                harness.push([token_id], index=index)
            harness.push([*b"cd", EOS], index=index, finish=FinishReason.STOP)
        return harness.stream

    parts, whole = joined(drain(pushed())), drain_whole(pushed())
    assert whole.finished and whole.outputs == parts.outputs


def test_whoever_waits_for_the_whole_is_woken_once() -> None:
    """Not for each token, and at the end, or when there will be none."""

    async def scenario(ends: bool) -> tuple[int, RequestOutput]:
        harness = Harness(SamplingParams())
        waiting = asyncio.ensure_future(harness.stream.whole())
        await asyncio.sleep(0)
        futures: set[int] = set()
        for _ in range(4):
            harness.push([65])
            harness.stream.push_tokens(harness.ids[0], [66])
            await asyncio.sleep(0)
            assert harness.stream._waiting is not None and not harness.stream._waiting.done()
            futures.add(id(harness.stream._waiting))
        if ends:
            harness.push([EOS], finish=FinishReason.STOP)
        else:
            harness.stream.fail(EngineDeadError("gone"))
        return len(futures), await waiting

    woken, output = asyncio.run(asyncio.wait_for(scenario(True), 5.0))
    assert (woken, output.outputs[0].text) == (1, "AB" * 4)
    with pytest.raises(EngineDeadError, match="gone"):
        asyncio.run(asyncio.wait_for(scenario(False), 5.0))
