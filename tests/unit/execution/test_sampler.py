# SPDX-License-Identifier: Apache-2.0
"""Sampling by seat: state belongs to its request alone and follows it through steps and preemption."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.core.request import SamplingParams
from tokenspeed.execution.drawn import SamplerOutput
from tokenspeed.execution.logprobs import LOGPROB_MIN, token_logprobs
from tokenspeed.execution.sampler import Sampler, SamplingOps
from tokenspeed.kernels.ops.sampling import Sampled, SamplingInputs
from tokenspeed.kernels.registry import KernelContext, bind

VOCAB = 40
PROMPT = [1, 2, 3, 3, 30]
LOGPROBS = bind("logprobs", KernelContext("cpu", torch.float32)).call


class Recorder:
    """The bound op, and the inputs that it was last given."""

    def __init__(self) -> None:
        self.inputs: SamplingInputs | None = None
        self._call = bind("sampling", KernelContext("cpu", torch.float32)).call

    def __call__(self, logits_SV: torch.Tensor, inputs: SamplingInputs, into: Sampled | None = None) -> Any:
        self.inputs = inputs
        return self._call(logits_SV, inputs, into)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def sampler(recorder: Recorder) -> Sampler:
    return Sampler(SamplingOps(recorder, LOGPROBS), 6, VOCAB, torch.device("cpu"))


def logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def sample(sampler: Sampler, logits_SV: torch.Tensor, seats: list[int], positions: list[int]) -> SamplerOutput:
    return sampler.sample(logits_SV, np.array(seats, dtype=np.int64), np.array(positions, dtype=np.int64)).read()


def test_greedy_seats_give_the_op_nothing_to_do(sampler: Sampler, recorder: Recorder, tools: Any) -> None:
    for seat in range(3):
        sampler.seat(tools.make_seating(seat, PROMPT))
    values = logits(3)
    output = sample(sampler, values, [0, 1, 2], [5, 5, 5])
    assert recorder.inputs == SamplingInputs()
    assert output.token_ids_S.tolist() == values.argmax(-1).tolist()
    assert output.logprobs is None


def test_greedy_rows_of_a_host_are_told_anew_by_the_same_call(sampler: Sampler, recorder: Recorder, tools: Any) -> None:
    for seat in range(3):
        sampler.seat(tools.make_seating(seat, PROMPT))
    values, seats, positions = logits(3), np.array([2, 0, 1]), np.array([5, 5, 5])
    values[1, 4] = math.nan
    wanted = values.argmax(-1).tolist()
    wanted[1] = 0
    first = sampler.sample(values, seats, positions)
    assert first.read().token_ids_S.tolist() == wanted
    assert first.read().is_faulty_S.tolist() == [False, True, False]
    inputs = recorder.inputs
    values.neg_()  # what was sampled before stays what it was
    second = sampler.sample(values, seats, positions).read()
    assert second.token_ids_S.tolist() == [int(values[0].argmax()), 0, int(values[2].argmax())]
    assert first.token_ids_S.tolist() == wanted
    assert recorder.inputs is inputs
    # The same rows, of which one now belongs to somebody who wishes more.
    sampler.seat(tools.make_seating(1, PROMPT, SamplingParams(temperature=0.0, seed=0, logit_bias=((9, 90.0),))))
    assert sampler.sample(values, seats, positions).read().token_ids_S.tolist()[2] == 9
    assert recorder.inputs is not None
    assert recorder.inputs.edits is not None


def test_rows_of_a_host_that_draw_are_one_call_with_what_the_last_one_had(
    sampler: Sampler, recorder: Recorder, tools: Any
) -> None:
    """The tokens of the long way, beside greedy rows, of somebody who takes a seat, and of rows that come and go."""
    on_host = Sampler(SamplingOps(recorder, LOGPROBS), 6, VOCAB, torch.device("cpu"))

    def take(seat: int, **params: Any) -> None:
        on_host.seat(tools.make_seating(seat, PROMPT, SamplingParams(**params)))
        edited = {"logit_bias": ((9, 0.0),), **params}  # which is what the long way is for
        sampler.seat(tools.make_seating(seat, PROMPT, SamplingParams(**edited)))

    def both(seats: Any, position: int) -> list[int]:
        values, positions = logits(len(seats), position), np.full(len(seats), position)
        values[-1, 3] = math.nan if position == 7 else 0.0
        wanted = sampler.sample(values, seats.copy(), positions).read()
        output = on_host.sample(values, seats, positions).read()
        assert output.token_ids_S.tolist() == wanted.token_ids_S.tolist()
        assert (
            output.is_faulty_S.tolist() == wanted.is_faulty_S.tolist() == [False] * (len(seats) - 1) + [position == 7]
        )
        assert (output.logprobs is None) == (wanted.logprobs is None)
        return output.token_ids_S.tolist()

    take(0, temperature=1.1, seed=3, top_p=0.9)
    take(1, temperature=0.0, seed=4)
    take(2, temperature=0.7, seed=5)
    seats, given = np.array([2, 1, 0]), []
    told = []
    for position in range(5, 12):
        told.append(both(seats, position))
        given.append(recorder.inputs)
    assert len({tuple(each) for each in told}) > 4
    assert all(each is given[0] for each in given)
    take(2, temperature=9.0, seed=6, top_k=3, logprobs=2)  # the same array of seats, but somebody else sits there
    assert [both(seats, position) for position in range(5, 12)] != told
    assert recorder.inputs is not given[0]
    for each in (np.array([0]), np.array([1]), np.array([0, 2]), seats):
        both(each, 6)
    take(0, temperature=1.1, seed=3, top_p=0.9, logit_bias=((9, 90.0),))
    assert both(seats, 5)[2] == 9


@pytest.mark.parametrize("num_generated", [0, 4])
def test_penalties_follow_a_plain_reference(sampler: Sampler, tools: Any, num_generated: int) -> None:
    params = SamplingParams(
        temperature=0.0,
        seed=0,
        presence_penalty=0.6,
        frequency_penalty=0.8,
        repetition_penalty=1.4,
        logit_bias=((7, 2.0), (8, -1.0), (999, 5.0)),
    )
    generated = [7, 7, 9, 30][:num_generated]
    sampler.seat(tools.make_seating(0, [5], tools.GREEDY))
    sampler.seat(tools.make_seating(4, PROMPT, params, generated=generated))
    sequence = [*PROMPT, *generated]
    for step in range(25):
        values = logits(2, seed=step % 3)
        expected = []
        output_ids = sequence[len(PROMPT) :]
        for token in range(VOCAB):
            value = float(values[1, token])
            if token in sequence:
                value = value / 1.4 if value > 0 else value * 1.4
            value -= 0.8 * output_ids.count(token) + 0.6 * (token in output_ids)
            expected.append(value + {7: 2.0, 8: -1.0}.get(token, 0.0))
        output = sample(sampler, values, [0, 4], [1 + step, len(sequence)])
        assert output.token_ids_S.tolist() == [int(values[0].argmax()), int(np.argmax(expected))]
        sequence.append(int(output.token_ids_S[1]))
    assert len(set(sequence)) > 10


def test_a_seat_keeps_nothing_of_the_request_before(sampler: Sampler, recorder: Recorder, tools: Any) -> None:
    heavy = SamplingParams(
        temperature=1.0,
        seed=9,
        top_k=3,
        min_p=0.1,
        presence_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias=((0, 50.0),),
        min_tokens=5,
        logprobs=4,
    )
    sampler.seat(tools.make_seating(0, PROMPT, heavy, end_token_ids=(3,), forced=[1, 2]))
    assert sample(sampler, logits(1), [0], [5]).token_ids_S.tolist() == [1]
    assert recorder.inputs is not None
    assert None not in (recorder.inputs.draws, recorder.inputs.penalties, recorder.inputs.edits)
    sampler.seat(tools.make_seating(0, PROMPT))
    values = logits(1, seed=1)
    output = sample(sampler, values, [0], [6])
    assert recorder.inputs == SamplingInputs()
    assert output.token_ids_S.tolist() == values.argmax(-1).tolist()
    assert output.logprobs is None


def test_end_tokens_are_banned_until_min_tokens(sampler: Sampler, tools: Any) -> None:
    params = SamplingParams(temperature=0.0, seed=0, min_tokens=3)
    sampler.seat(tools.make_seating(2, PROMPT, params, end_token_ids=(11, 12, 4000)))
    values = torch.zeros(1, VOCAB)
    values[0, 11], values[0, 12], values[0, 5] = 9.0, 8.0, 1.0
    tokens = [int(sample(sampler, values, [2], [len(PROMPT) + step]).token_ids_S[0]) for step in range(5)]
    assert tokens == [5, 5, 5, 11, 11]


def test_a_draw_depends_on_its_own_seed_and_position_only(sampler: Sampler, tools: Any) -> None:
    params = [
        SamplingParams(temperature=1.2, seed=5),
        SamplingParams(temperature=0.8, seed=6, top_p=0.8),
        SamplingParams(temperature=0.0, seed=7),
        SamplingParams(temperature=1.0, seed=2**64 - 1, top_k=7),
    ]
    values = logits(4)
    for seat, each in enumerate(params):
        sampler.seat(tools.make_seating(seat, PROMPT, each))
    for position in range(5, 30):
        together = sample(sampler, values, [0, 1, 2, 3], [position] * 4).token_ids_S.tolist()
        backwards = sample(sampler, values.flip(0), [3, 2, 1, 0], [position] * 4).token_ids_S.tolist()
        alone = [int(sample(sampler, values[row : row + 1], [row], [position]).token_ids_S[0]) for row in range(4)]
        assert together == alone == backwards[::-1]
    sampler.seat(tools.make_seating(5, PROMPT[:2], params[0], generated=PROMPT[2:]))
    assert sample(sampler, values[:1], [5], [9]).token_ids_S == sample(sampler, values[:1], [0], [9]).token_ids_S
    draws = {int(sample(sampler, values[:1], [0], [position]).token_ids_S[0]) for position in range(40)}
    assert len(draws) > 5


def test_unset_seeds_differ_between_requests(sampler: Sampler, tools: Any) -> None:
    flat = torch.zeros(2, VOCAB)
    for seat in range(2):
        sampler.seat(tools.make_seating(seat, PROMPT, SamplingParams()))
    draws = [sample(sampler, flat, [0, 1], [p, p]).token_ids_S.tolist() for p in range(20)]
    assert [first for first, _ in draws] != [second for _, second in draws]


def test_log_probabilities_ignore_how_the_token_was_chosen(sampler: Sampler, tools: Any) -> None:
    params = SamplingParams(temperature=2.0, seed=1, logit_bias=((17, 90.0),), logprobs=3, presence_penalty=1.0)
    sampler.seat(tools.make_seating(0, PROMPT))
    sampler.seat(tools.make_seating(1, PROMPT, params))
    values = logits(2)
    output = sample(sampler, values, [0, 1], [5, 5])
    expected = torch.log_softmax(values[1], -1)
    assert output.token_ids_S[1] == 17
    assert output.logprobs is not None
    assert output.logprobs[0] is None
    entry = output.logprobs[1]
    assert entry is not None
    assert entry.token_id == 17
    assert entry.logprob == pytest.approx(float(expected[17]), abs=1e-6)
    assert entry.rank == 1 + int((expected > expected[17]).sum())
    assert [token for token, _ in entry.top] == expected.topk(3).indices.tolist()


def test_log_probabilities_are_finite_and_chunks_join(monkeypatch: pytest.MonkeyPatch) -> None:
    values = logits(7)
    values[2, 3] = -math.inf
    tokens = torch.tensor([0, 1, 3, 5, 6, 7, 8])
    wanted = [0, 1, 2, 3, 0, 20, 1]
    whole = token_logprobs(LOGPROBS, values, tokens, wanted)
    assert [len(entry.top) for entry in whole] == wanted
    assert whole[2].logprob == LOGPROB_MIN
    assert all(value >= LOGPROB_MIN for entry in whole for _, value in entry.top)
    monkeypatch.setattr("tokenspeed.execution.logprobs._CHUNK_VALUES", 2 * VOCAB)
    assert token_logprobs(LOGPROBS, values, tokens, wanted) == whole


def test_a_faulty_row_is_neither_counted_nor_chosen(sampler: Sampler, tools: Any) -> None:
    params = SamplingParams(temperature=0.0, seed=0, frequency_penalty=100.0)
    for seat in range(2):
        sampler.seat(tools.make_seating(seat, PROMPT, params))
    values = logits(2)
    values[0, 5] = math.nan
    output = sample(sampler, values, [0, 1], [5, 5])
    assert output.is_faulty_S.tolist() == [True, False]
    zero = torch.zeros(1, VOCAB)
    zero[0, 0] = 1.0
    assert sample(sampler, zero, [0], [5]).token_ids_S.tolist() == [0]
