# SPDX-License-Identifier: Apache-2.0
"""Which tokens each seat may take next: grammars and thinking budgets, followed off the critical path.

Threads of their own compile grammars while prompts are computed, and one more takes each sampled token and fills the
next mask while the next forward runs: a grammar that takes long holds up nobody else's tokens. Knows masks; knows
neither logits nor what a grammar is made of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenspeed.core.plan import Int32Array, Seating
from tokenspeed.core.request import Grammar, ThinkingBudget
from tokenspeed.grammar import DEFAULT, Compiler, GrammarError, Matcher, Vocabulary, resolve

_log = logging.getLogger("tokenspeed.execution")

_NUM_COMPILING = 2

Resolve = Callable[[str, Vocabulary], Compiler]


@dataclass(frozen=True, slots=True)
class Next:
    """What may come next. mask: (ceil(V / 32),) int32, bit i % 32 of word i // 32 set where token i may; None where any
    may. must_end: nothing may but an end token."""

    mask: Int32Array | None
    must_end: bool


def is_constrained(seating: Seating) -> bool:
    """Whether a seat has anything to follow."""
    return seating.sampling.grammar is not None or seating.sampling.thinking is not None


class Constraints:
    """The constraints of all seats. Methods from one thread at a time, `know` from any."""

    def __init__(self, num_seats: int, vocab_size: int, *, backend: Resolve = resolve) -> None:
        self._vocab_size = vocab_size
        self._backend = backend
        self._every = _bits(range(vocab_size), vocab_size)
        self._end_ids: tuple[int, ...] = ()
        self._compiling = ThreadPoolExecutor(_NUM_COMPILING, thread_name_prefix="grammar-compile")
        self._following = ThreadPoolExecutor(1, thread_name_prefix="grammar-follow")
        self._compiler: Future[Compiler] | None = None
        self._seats: list[_Constraint | None] = [None] * num_seats

    def know(self, vocabulary: Vocabulary) -> None:
        """From now on there may be grammars."""
        self._end_ids = vocabulary.end_ids
        tokens = vocabulary.tokens[: self._vocab_size]  # a model may have more logits than there are tokens
        padded = (*tokens, *(b"" for _ in range(self._vocab_size - len(tokens))))
        known = msgspec.structs.replace(vocabulary, tokens=padded)
        self._compiler = self._compiling.submit(self._backend, DEFAULT, known)

    def seat(self, seating: Seating) -> None:
        """A request takes a seat, with what it has generated so far."""
        if not is_constrained(seating):
            self._seats[seating.seat] = None
            return
        constraint = _Constraint(seating, self._vocab_size, self._every, self._end_ids)
        constraint.pending = self._compiling.submit(constraint.begin, self._compiler)
        self._seats[seating.seat] = constraint

    def next(self, seat: int, *, may_end: bool) -> Next:
        """What may come next. Waits until it is known. may_end: whether an end token may, where others may too. Raises
        GrammarError when the text can no longer be followed."""
        constraint = self._seat_of(seat)
        constraint.pending.result()
        return constraint.next(may_end)

    def accept(self, seat: int, token_id: int) -> None:
        """The token that the seat takes. One that may not come, as a script says it, ends the constraint."""
        constraint = self._seat_of(seat)
        constraint.pending = self._following.submit(constraint.accept, constraint.pending, token_id)

    def close(self) -> None:
        """End the threads."""
        for pool in (self._compiling, self._following):
            pool.shutdown(cancel_futures=True)

    def _seat_of(self, seat: int) -> _Constraint:
        constraint = self._seats[seat]
        assert constraint is not None, f"seat {seat} has no constraint"
        return constraint


class _Constraint:
    """One seat's. pending: the work, on another thread, after which the next mask is known."""

    def __init__(self, seating: Seating, vocab_size: int, every: Int32Array, end_ids: Sequence[int]) -> None:
        self.pending: Future[None] = Future()
        self._mask = np.zeros_like(every)
        self._is_free = True
        self._every = every
        self._seating = seating
        self._vocab_size = vocab_size
        self._matcher: Matcher | None = None
        budget = seating.sampling.thinking
        self._budget = None if budget is None else _Budget(budget)
        self._ends = _bits((*seating.end_token_ids, *end_ids), vocab_size)

    def begin(self, compiler: Future[Compiler] | None) -> None:
        seating = self._seating
        if seating.sampling.grammar is not None:
            assert compiler is not None, "a grammar came before the vocabulary"
            self._matcher = _compiled(compiler.result(), seating.sampling.grammar)
        for token_id in seating.token_ids[seating.prompt_len :].tolist():
            self._take(token_id)
        self._fill()

    def accept(self, before: Future[None], token_id: int) -> None:
        """before: what was pending; it may be under way on another thread."""
        before.result()
        self._take(token_id)
        self._fill()

    def next(self, may_end: bool) -> Next:
        if self._is_free:
            return Next(None, must_end=False)
        others = self._mask & ~self._ends
        if others.any():
            return Next(self._mask if may_end else others, must_end=False)
        return Next(self._mask, must_end=True)

    def _take(self, token_id: int) -> None:
        if self._budget is not None:
            self._budget.take(token_id)
        if self._matcher is not None and not self._matcher.accept(token_id):
            self._matcher = None

    def _fill(self) -> None:
        forced = None if self._budget is None else self._budget.forced
        if forced is not None:
            self._mask[:] = _bits((forced,), self._vocab_size)
            self._is_free = False
        elif self._matcher is not None:
            self._matcher.fill(self._mask)
            self._is_free = bool(((self._mask & self._every) == self._every).all())
        else:
            self._is_free = True


def _compiled(compiler: Compiler, grammar: Grammar) -> Matcher:
    try:
        return compiler.compile(grammar)
    except GrammarError:
        _log.exception("a grammar that was found right cannot be compiled")
        raise


class _Budget:
    """Counts the tokens of one block of reasoning. forced: the token that has to come next, to close it."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._is_open = budget.is_open
        self._is_over = False
        self._num_taken = 0
        self._tail: list[int] = []
        self._num_closed = 0
        self.forced: int | None = None
        self._force()

    def take(self, token_id: int) -> None:
        if self._is_over:
            return
        budget = self._budget
        self._tail = [*self._tail, token_id][-max(len(budget.open_ids), len(budget.close_ids)) :]
        if self.forced is not None:
            self._num_closed += 1
        elif self._is_open:
            self._num_taken += 1
        if self._is_open and _ends_with(self._tail, budget.close_ids):
            self._is_over = True
        elif not self._is_open and _ends_with(self._tail, budget.open_ids):
            self._is_open = True
        self._force()

    def _force(self) -> None:
        is_spent = self._is_open and not self._is_over and self._num_taken >= self._budget.num_tokens
        close = self._budget.close_ids
        self.forced = close[self._num_closed] if is_spent and self._num_closed < len(close) else None


def _ends_with(ids: Sequence[int], ending: Sequence[int]) -> bool:
    return len(ending) > 0 and tuple(ids[-len(ending) :]) == tuple(ending)


def _bits(ids: Sequence[int], vocab_size: int) -> Int32Array:
    bits: NDArray[np.bool_] = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    bits[[index for index in ids if index < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
