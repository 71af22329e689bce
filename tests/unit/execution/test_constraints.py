# SPDX-License-Identifier: Apache-2.0
"""What seats may take next: grammars from where the seat stands, ends that come when nothing else may, reasoning that
is closed when its budget is spent, errors that end one seat."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from tiny_vocabularies import byte_level
from tokenspeed.core.ipc import Vocabulary
from tokenspeed.core.plan import Seating
from tokenspeed.core.request import Grammar, SamplingParams, ThinkingBudget
from tokenspeed.execution.constraints import Constraints
from tokenspeed.execution.sampler import Sampler, SamplingOps
from tokenspeed.grammar import Compiler, GrammarError, Mask, Matcher, resolve
from tokenspeed.kernels.ops.logprobs.reference import logprobs
from tokenspeed.kernels.ops.sampling.reference import sample
from tokenspeed.llm.grammars import vocabulary_of
from tokenspeed.llm.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_source(byte_level())
END = 257
NUM_LOGITS = TOKENIZER.vocab_size + 37  # models pad their vocabularies
LETTER = {letter: TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "abcxyz"}


def seating(seat: int = 0, generated: Sequence[int] = (), **options: object) -> Seating:
    params = SamplingParams(temperature=0.0, seed=0, **options)  # type: ignore[arg-type]
    ids = np.array([7, 7, *generated], np.int32)
    return Seating(seat, f"r{seat}", params, () if params.ignore_eos else (END,), ids, 2)


@pytest.fixture
def constraints() -> Iterator[Constraints]:
    made = Constraints(4, NUM_LOGITS)
    made.know(vocabulary_of(TOKENIZER, [END]))
    yield made
    made.close()


def may(constraints: Constraints, seat: int, *, may_end: bool = True) -> set[int] | None:
    mask = constraints.next(seat, may_end=may_end).mask
    if mask is None:
        return None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_a_seat_is_followed_token_by_token(constraints: Constraints) -> None:
    constraints.seat(seating(grammar=Grammar("regex", "ab|c")))
    assert may(constraints, 0) == {LETTER["a"], LETTER["c"]}
    constraints.accept(0, LETTER["a"])
    assert may(constraints, 0) == {LETTER["b"]}
    constraints.accept(0, LETTER["b"])
    step = constraints.next(0, may_end=False)
    assert step.must_end
    assert may(constraints, 0, may_end=False) == {END}, "an end that nothing else can stand for comes even early"


def test_an_end_waits_where_something_else_may_come(constraints: Constraints) -> None:
    constraints.seat(seating(grammar=Grammar("regex", "a*")))
    assert may(constraints, 0) >= {LETTER["a"], END}
    assert END not in (may(constraints, 0, may_end=False) or ())


def test_a_seat_goes_on_from_what_it_has_generated(constraints: Constraints) -> None:
    """As after a preemption."""
    constraints.seat(seating(2, [LETTER["a"]], grammar=Grammar("regex", "ab|c")))
    assert may(constraints, 2) == {LETTER["b"]}


def test_nothing_of_the_one_before_stays_in_a_seat(constraints: Constraints) -> None:
    constraints.seat(seating(grammar=Grammar("regex", "ab")))
    constraints.seat(seating(grammar=Grammar("regex", "xyz")))
    assert may(constraints, 0) == {LETTER["x"]}


class _Waits:
    """A compiler that is done when it is told to be."""

    def __init__(self, compiler: Compiler, may_go_on: threading.Event) -> None:
        self._compiler, self._may_go_on = compiler, may_go_on

    def compile(self, grammar: Grammar) -> Matcher:
        assert self._may_go_on.wait(10.0)
        return self._compiler.compile(grammar)


def test_a_token_that_comes_while_the_grammar_is_compiled_is_taken_after_that() -> None:
    compiled = threading.Event()
    slow = Constraints(4, NUM_LOGITS, backend=lambda name, vocabulary: _Waits(resolve(name, vocabulary), compiled))
    slow.know(vocabulary_of(TOKENIZER, [END]))
    slow.seat(seating(grammar=Grammar("regex", "ab|c")))
    slow.accept(0, LETTER["a"])
    time.sleep(0.05)
    compiled.set()
    assert may(slow, 0) == {LETTER["b"]}
    slow.close()


def test_a_token_that_may_not_come_frees_the_seat(constraints: Constraints) -> None:
    """A script says what it says."""
    constraints.seat(seating(grammar=Grammar("regex", "ab")))
    constraints.accept(0, LETTER["z"])
    assert may(constraints, 0) is None


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_reasoning_is_closed_when_its_budget_is_spent(constraints: Constraints, num_tokens: int) -> None:
    constraints.seat(seating(thinking=ThinkingBudget(num_tokens, True, (), (LETTER["x"], LETTER["y"]))))
    for _ in range(num_tokens):
        assert may(constraints, 0) is None
        constraints.accept(0, LETTER["a"])
    for letter in "xy":
        assert may(constraints, 0) == {LETTER[letter]}
        constraints.accept(0, LETTER[letter])
    for _ in range(5):
        assert may(constraints, 0) is None
        constraints.accept(0, LETTER["a"])


def test_reasoning_that_closes_itself_has_spent_nothing_more(constraints: Constraints) -> None:
    constraints.seat(seating(thinking=ThinkingBudget(2, False, (LETTER["b"],), (LETTER["x"],))))
    for letter in "aaabax" + "a" * 9:  # before it opens nothing is counted, and nothing after it closes
        assert may(constraints, 0) is None, letter
        constraints.accept(0, LETTER[letter])


class _Breaks:
    """A backend whose matchers give up at the second token."""

    def __init__(self) -> None:
        self._count = 0

    def compile(self, _: Grammar) -> _Breaks:
        return self

    def fill(self, mask: Mask) -> None:
        if self._count:
            raise GrammarError("too hard")
        mask[:] = -1

    def accept(self, _: int) -> bool:
        self._count += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def copy(self) -> _Breaks:
        return self


def test_a_grammar_that_cannot_be_followed_ends_its_row_and_no_other() -> None:
    """Never is such a row sampled without its grammar."""
    sampler = Sampler(SamplingOps(sample, logprobs), 4, NUM_LOGITS, torch.device("cpu"))
    broken = Constraints(4, NUM_LOGITS, backend=lambda _name, _vocabulary: _Breaks())
    broken.know(Vocabulary((), (), (END,), ""))
    sampler._constraints = broken
    for seat, grammar in ((0, Grammar("regex", "a")), (1, None)):
        sampler.seat(seating(seat, grammar=grammar))
    logits = torch.zeros(2, NUM_LOGITS)
    seats = np.array([0, 1])
    assert not sampler.sample(logits, seats, np.array([2, 2])).read().is_faulty_S.any()
    assert sampler.sample(logits, seats, np.array([3, 3])).read().is_faulty_S.tolist() == [True, False]
    sampler.close()
    broken.close()


def test_sampled_rows_keep_to_their_grammar_and_others_are_free() -> None:
    sampler = Sampler(SamplingOps(sample, logprobs), 4, NUM_LOGITS, torch.device("cpu"))
    sampler.know(vocabulary_of(TOKENIZER, [END]))
    sampler.seat(seating(0, grammar=Grammar("regex", "[ab]{6}")))
    sampler.seat(seating(1))
    sampler.seat(seating(3, grammar=Grammar("json_schema", '{"const": "é"}'), min_tokens=40))
    generator = torch.Generator().manual_seed(1)
    texts: dict[int, list[int]] = {0: [], 1: [], 3: []}
    for position in range(2, 8):
        drawn = sampler.sample(
            torch.randn(3, NUM_LOGITS, generator=generator), np.array([0, 1, 3]), np.full(3, position)
        ).read()
        assert not drawn.is_faulty_S.any()
        for seat, token_id in zip((0, 1, 3), drawn.token_ids_S.tolist(), strict=True):
            texts[seat].append(token_id)
    assert set(TOKENIZER.decode(texts[0])) <= set("ab")
    assert len(TOKENIZER.decode(texts[0])) == 6
    said = TOKENIZER.decode([token_id for token_id in texts[3] if token_id != END])
    assert said == '"é"', "an end that comes early where nothing else may"
    assert any(token_id not in (LETTER["a"], LETTER["b"]) for token_id in texts[1])
    sampler.close()
