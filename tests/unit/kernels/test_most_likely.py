# SPDX-License-Identifier: Apache-2.0
"""The op most_likely gives what sampling without parts gives, and looks at its tensors anew in every call."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels.ops import most_likely as op
from tokenspeed.kernels.ops.most_likely import cases
from tokenspeed.kernels.ops.sampling import SamplingInputs
from tokenspeed.kernels.registry import KernelContext, Ok, bind, solutions_of

CPU = KernelContext("cpu", torch.float32)
NAMES = [each.name for each in solutions_of("most_likely") if each.supports(CPU) == Ok()]


def call_of(name: str) -> op.MostLikely:
    call: op.MostLikely = bind("most_likely", KernelContext("cpu", torch.float32, {"most_likely": name})).call
    return call


@pytest.mark.parametrize("name", NAMES)
def test_it_gives_what_sampling_without_parts_gives(name: str) -> None:
    sample = bind("sampling", CPU).call
    most_likely = call_of(name)
    for case in cases.cases(torch.float32):
        logits_SV, told_2S = case.args
        most_likely(logits_SV, told_2S)
        sampled = sample(logits_SV, SamplingInputs())
        assert told_2S[0].tolist() == sampled.token_ids_S.tolist(), case.name
        assert told_2S[1].tolist() == sampled.is_faulty_S.tolist(), case.name


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_come_again_have_other_numbers(name: str) -> None:
    most_likely = call_of(name)
    logits_SV, told_2S = torch.zeros(2, 50), torch.zeros(2, 2, dtype=torch.int64)
    other_2S = torch.zeros(2, 2, dtype=torch.int64)
    for token in (3, 49, 0):
        logits_SV.zero_()[:, token] = 1.0
        most_likely(logits_SV, told_2S)
        assert told_2S.tolist() == [[token, token], [0, 0]]
    most_likely(logits_SV, other_2S)
    assert other_2S.tolist() == [[0, 0], [0, 0]]
    logits_SV[1, 7] = float("nan")
    most_likely(logits_SV, other_2S)
    assert other_2S.tolist() == [[0, 0], [0, 1]]
    wider_SV = torch.zeros(2, 90)
    wider_SV[:, 80] = 1.0
    most_likely(wider_SV, other_2S)
    assert other_2S.tolist() == [[80, 80], [0, 0]]
