# SPDX-License-Identifier: Apache-2.0
"""Generate and Abort: tokens, ends, log-probabilities, n; what is refused; who is harmed by whom."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest
from smg_grpc_proto import tokenspeed_scheduler_pb2 as pb2

from fakes import EOS, FakeRunner, FakeSource, FakeWorker
from tokenspeed.core.request import FinishReason
from tokenspeed.llm.outputs import CompletionOutput, RequestOutput, RequestTimes
from tokenspeed.server.generation import Piece
from tokenspeed.server.grpc.answers import Answer
from unit.server.conftest import wait_until
from unit.server.grpc.conftest import StartWorker, Worker


def refusal(call: Any) -> grpc.RpcError:
    """What the call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


def saying(*token_ids: int) -> FakeWorker:
    """An engine that says these tokens and then `z`."""
    return FakeWorker(
        runner=FakeRunner(next_token=lambda _, count: token_ids[count] if count < len(token_ids) else ord("z"))
    )


def test_the_whole_answer_is_one_message(worker: Worker) -> None:
    complete = worker.complete(sampling={"max_new_tokens": 3})
    assert bytes(complete.output_ids) == b"abc"
    assert complete.finish_reason == "length"
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (2, 3, 0)
    assert complete.WhichOneof("matched_stop") is None


def test_a_stream_is_deltas_and_then_the_whole(worker: Worker) -> None:
    *chunks, last = worker.generate(stream=True, sampling={"max_new_tokens": 5})
    assert bytes(token_id for each in chunks for token_id in each.chunk.token_ids) == b"abcde"
    assert chunks[-1].chunk.completion_tokens == 5
    assert all(each.chunk.prompt_tokens == 2 and each.request_id == "r" for each in chunks)
    assert bytes(last.complete.output_ids) == b"abcde"


def test_n_completions_each_end_once_and_under_their_own_index(worker: Worker) -> None:
    messages = list(worker.generate(stream=True, sampling={"n": 3, "max_new_tokens": 2}))
    ends = [each.complete for each in messages if each.HasField("complete")]
    assert sorted(each.index for each in ends) == [0, 1, 2]
    for end in ends:
        chunks = [each.chunk for each in messages if each.HasField("chunk") and each.chunk.index == end.index]
        assert [token_id for each in chunks for token_id in each.token_ids] == list(end.output_ids) == [*b"ab"]


@pytest.mark.parametrize(
    "case",
    [  # what the model says, how it is sampled, the ids of the answer, what matched
        ((*b"ab", EOS), {}, b"ab", {"matched_token_id": EOS}),
        ((*b"ab", EOS), {"no_stop_trim": True}, (*b"ab", EOS), {"matched_token_id": EOS}),
        ((*b"ab", EOS), {"ignore_eos": True, "max_new_tokens": 4}, (*b"ab", EOS, ord("z")), {}),
        (b"abc", {"stop_token_ids": [ord("c")]}, b"ab", {"matched_token_id": ord("c")}),
        (b"abcd", {"stop": ["bc"]}, b"abc", {"matched_stop_str": "bc"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_end_is_trimmed_and_named(start_worker: StartWorker, case: tuple[Any, Any, Any, Any], stream: bool) -> None:
    says, sampling, ids, matched = case
    *chunks, last = start_worker(saying(*says)).generate(stream=stream, sampling=sampling)
    complete = last.complete
    assert list(complete.output_ids) == list(ids)
    assert complete.finish_reason == ("stop" if matched else "length")
    which = complete.WhichOneof("matched_stop")
    assert ({which: getattr(complete, which)} if which else {}) == matched
    if stream:
        assert [token_id for each in chunks for token_id in each.chunk.token_ids] == list(ids)


def test_a_stream_that_ends_at_once_still_begins(start_worker: StartWorker) -> None:
    chunk, last = start_worker(saying(EOS)).generate(stream=True)
    assert list(chunk.chunk.token_ids) == []
    assert chunk.chunk.completion_tokens == last.complete.completion_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_stand_beside_their_tokens(worker: Worker, stream: bool) -> None:
    messages = list(worker.generate(stream=stream, return_logprob=True, top_logprobs_num=2))
    parts = [each.chunk for each in messages[:-1]] if stream else [messages[-1].complete]
    for part in parts:
        own_ids = part.token_ids if stream else part.output_ids
        assert list(part.output_logprobs.token_ids) == list(own_ids)
        assert list(part.output_logprobs.token_logprobs) == [-0.5] * len(own_ids)
        assert [list(top.token_ids) for top in part.output_logprobs.top_logprobs] == [[1, 2]] * len(own_ids)
    assert sum(len(part.output_logprobs.token_ids) for part in parts) == 8


def test_sampling_reaches_the_engine_as_it_was_sent(start_worker: StartWorker) -> None:
    source = FakeSource(generation_config={"temperature": 0.25, "top_k": 7, "eos_token_id": [EOS, 258]})
    worker = start_worker(source=source)
    request = {"temperature": 0.0, "top_p": 0.5, "min_p": 0.25, "presence_penalty": 1.0, "frequency_penalty": -1.0}
    request |= {"repetition_penalty": 1.5, "min_new_tokens": 2, "sampling_seed": 2**64 - 3, "logit_bias": {"65": 2.0}}
    worker.complete(sampling=request)
    sampling = worker.submits()[-1].request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k) == (0.0, 0.5, 0.25, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (sampling.min_tokens, sampling.seed, sampling.logit_bias) == (2, -3, ((65, 2.0),))
    unset = pb2.GenerateRequest(tokenized=pb2.TokenizedInput(input_ids=[1]))
    list(worker.stub.Generate(unset, timeout=30))
    assert worker.submits()[-1].request.sampling.temperature == 0.25


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokenized": pb2.TokenizedInput()}, "tokenized.input_ids is empty"),
        ({"tokenized": pb2.TokenizedInput(input_ids=[1 << 20])}, "outside this model's vocabulary"),
        ({"tokenized": pb2.TokenizedInput(input_ids=[1] * 600)}, "maximum context length is 512"),
        ({"sampling": {"temperature": -1.0}}, "temperature"),
        ({"sampling": {"max_new_tokens": 0}}, "max_tokens"),
        ({"sampling": {"logit_bias": {"x": 1.0}}}, "keys are token ids"),
        ({"sampling": {"custom_params": {"a": 1}}}, "custom_params"),
        ({"mm_inputs": pb2.MultimodalInputs(items=[pb2.MultimodalItem()])}, "reads text only"),
        ({"kv_bootstrap_info": pb2.KvBootstrapInfo(bootstrap_port=1)}, "kv_bootstrap_info"),
        ({"token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ({"return_logprob": True, "top_logprobs_num": 21}, "logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(worker: Worker, fields: dict[str, Any], words: str) -> None:
    error = refusal(worker.generate(**fields))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details()
    assert bytes(worker.complete(sampling={"max_new_tokens": 1}).output_ids) == b"a"


def test_a_full_queue_says_when_to_come_again(start_worker: StartWorker) -> None:
    engine = FakeWorker()
    worker = start_worker(engine)
    error = refusal(worker.generate(sampling={"n": 128}))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    gate = threading.Event()
    engine.runner.pace = lambda: gate.wait(10.0) and None
    call = worker.generate(sampling={"n": 68})
    try:
        wait_until(lambda: worker.llm.num_live == 68)
        error = refusal(worker.generate("one more"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata())["retry-after"] == "1"
    finally:
        gate.set()
        call.cancel()


def test_a_faulty_step_ends_one_call_alone(start_worker: StartWorker) -> None:
    engine = FakeWorker()
    engine.runner.faulty = frozenset({"bad.0"})
    worker = start_worker(engine)
    error = refusal(worker.generate("x", request_id="bad"))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert bytes(worker.complete("y", sampling={"max_new_tokens": 1}).output_ids) == b"a"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled_in_the_engine(start_worker: StartWorker, stream: bool) -> None:
    engine = FakeWorker()
    engine.runner.pace = lambda: engine.crash.wait(0.01) and None
    worker = start_worker(engine)
    call = worker.generate(stream=stream, sampling={"max_new_tokens": 400})
    if stream:
        next(call)
    wait_until(lambda: bool(worker.submits()))
    call.cancel()
    wait_until(lambda: worker.cancels() == [worker.submits()[0].request.request_id])


def test_an_aborted_request_ends_with_that_reason(start_worker: StartWorker) -> None:
    engine = FakeWorker()
    engine.runner.pace = lambda: engine.crash.wait(0.01) and None
    worker = start_worker(engine)
    call = worker.generate(stream=True, sampling={"max_new_tokens": 400, "n": 2})
    next(call)
    assert worker.stub.Abort(pb2.AbortRequest(request_id="r"), timeout=30).success
    ends = [each.complete for each in call if each.HasField("complete")]
    assert [(each.index, each.finish_reason) for each in ends] == [(0, "abort"), (1, "abort")]
    wait_until(lambda: len(worker.cancels()) == 2)
    again = worker.stub.Abort(pb2.AbortRequest(request_id="r"), timeout=30)
    assert not again.success
    assert again.message == "no request 'r' is running"


def test_only_what_had_not_ended_is_aborted() -> None:
    answer = Answer(pb2.GenerateRequest(), "r", 2)
    ended = CompletionOutput(0, "a", (97,), 1, finish_reason=FinishReason.LENGTH)
    output = RequestOutput("r", (1, 2), (ended,), 0, False, RequestTimes(0.0))
    (first,) = answer.messages(Piece(0, output, ((0, ended),)))
    assert (first.complete.index, first.complete.finish_reason) == (0, "length")
    (last,) = answer.aborted()
    assert (last.complete.index, last.complete.finish_reason, last.complete.prompt_tokens) == (1, "abort", 2)


def test_when_the_engine_dies_calls_end_and_later_ones_are_refused(start_worker: StartWorker) -> None:
    engine = FakeWorker()
    worker = start_worker(engine)
    engine.runner.pace = lambda: engine.crash.wait(0.01) and None
    call = worker.generate(stream=True, sampling={"max_new_tokens": 400})
    next(call)
    engine.crash.set()
    assert refusal(call).code() is grpc.StatusCode.UNAVAILABLE
    assert refusal(worker.generate()).code() is grpc.StatusCode.UNAVAILABLE
    assert not worker.stub.HealthCheck(pb2.HealthCheckRequest(), timeout=30).healthy
