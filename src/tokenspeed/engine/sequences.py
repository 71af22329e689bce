# SPDX-License-Identifier: Apache-2.0
"""What the loop remembers of each live request: its key, its tokens so far and the log-probabilities that wait for
their tokens; and of ended ones that asked to be kept, the key. Knows nothing of plans, pages or sockets.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tokenspeed.core.ipc import NUM_RETAINED_MAX
from tokenspeed.core.plan import FinishCode, Int32Array, RequestKey, Seating
from tokenspeed.core.request import EngineRequest, FinishReason, SequenceUpdate, TokenLogprobs

_REASONS = {
    FinishCode.NONE: None,
    FinishCode.STOP: FinishReason.STOP,
    FinishCode.LENGTH: FinishReason.LENGTH,
    FinishCode.CANCELLED: FinishReason.CANCELLED,
    FinishCode.FAULT: FinishReason.ERROR,
    FinishCode.DEADLINE: FinishReason.ERROR,
}
_NONE = int(FinishCode.NONE)  # looked at for every token
_KEPT = (FinishReason.STOP, FinishReason.LENGTH)
NUM_UNTOLD_MAX = 1024
"""Tokens that wait for the end of a request which tells them there, at most."""
FAULT_MESSAGE = "the model produced no usable numbers for this request (NaN), or its step failed"


class PromptLogprobs(Protocol):
    """Log-probabilities of prompt positions start, start + 1, …; position 0 has None."""

    @property
    def start(self) -> int: ...
    @property
    def entries(self) -> Sequence[TokenLogprobs | None]: ...


class Record:
    """One live request. `ending` is set once the API process asked for its end."""

    def __init__(self, request: EngineRequest, key: RequestKey, handle: int = 0) -> None:
        assert request.sampling.max_tokens is not None, f"{request.request_id}: max_tokens is unset"
        self.request = request
        self.key = key
        self.handle = handle
        self.prompt: Int32Array = np.frombuffer(request.token_ids, np.int32)
        self.max_tokens = request.sampling.max_tokens
        self.ending = False
        self._received_s = time.monotonic()
        self._has_started = False
        self._generated = array("i")
        self._logprobs: list[TokenLogprobs] = []
        self._is_plain = False  # after the first tokens, which come with more, if log-probabilities are not asked for
        self._told_cached_len = 0
        self._untold: list[int] = []  # only of a request that tells at its end
        self._prompt_logprobs = self._unknown_prompt_logprobs()

    def seating(self, seat: int) -> Seating:
        """What execution must know when the request takes a seat, after a preemption too."""
        generated = np.frombuffer(self._generated.tobytes(), np.int32)
        forced = self.request.forced_token_ids
        return Seating(
            seat=seat,
            request_id=self.request.request_id,
            sampling=self.request.sampling,
            end_token_ids=self.request.end_token_ids,
            token_ids=np.concatenate((self.prompt, generated)),
            prompt_len=len(self.prompt),
            forced_token_ids=None if forced is None else np.frombuffer(forced, np.int32),
        )

    def started(self) -> SequenceUpdate | None:
        """What the API process is told when the first step of the request begins; None of a later seat."""
        if self._has_started:
            return None
        self._has_started = True
        return SequenceUpdate(request_id=self.request.request_id, queue_s=time.monotonic() - self._received_s)

    def note_logprobs(self, logprobs: Sequence[TokenLogprobs] | None, prompt_logprobs: PromptLogprobs | None) -> None:
        """Keep a row's log-probabilities until the events say which of its tokens count."""
        if logprobs is not None and self.request.sampling.logprobs is not None:
            self._logprobs.extend(logprobs)
        if prompt_logprobs is not None and self._prompt_logprobs is not None:
            first, entries = prompt_logprobs.start, prompt_logprobs.entries
            assert first + len(entries) <= len(self.prompt), f"{first} + {len(entries)} of {len(self.prompt)} positions"
            self._prompt_logprobs[first : first + len(entries)] = entries

    def add(self, token_ids: list[int], finish: int, cached_len: int) -> list[int] | None:
        """Take an event row. The tokens to tell where they are all the news, maybe none yet; None where there is more,
        and `update` is to be called."""
        self._generated.extend(token_ids)
        if not self._is_plain or finish != _NONE or cached_len != self._told_cached_len or not token_ids:
            return None
        if not self.request.tells_at_end:
            return token_ids
        self._untold += token_ids
        if len(self._untold) < NUM_UNTOLD_MAX:
            return []
        told, self._untold = self._untold, []
        return told

    def update(self, token_ids: list[int], finish: int, cached_len: int) -> SequenceUpdate:
        """The update that the API process gets for one event row that was taken, and for what was not told yet."""
        self._told_cached_len = cached_len
        logprobs, self._logprobs = self._logprobs[: len(token_ids)], []
        code = FinishCode(finish)
        ended_by_token = code is FinishCode.STOP and bool(token_ids)
        if self._untold:
            token_ids, self._untold = self._untold + token_ids, []
        self._is_plain = self._is_plain or (bool(token_ids) and self.request.sampling.logprobs is None)
        return SequenceUpdate(
            request_id=self.request.request_id,
            token_ids=tuple(token_ids),
            cached_len=cached_len,
            logprobs=None if self.request.sampling.logprobs is None else tuple(logprobs),
            prompt_logprobs=self._take_prompt_logprobs() if token_ids else None,
            finish_reason=_REASONS[code],
            end_token_id=token_ids[-1] if ended_by_token else None,
            error=self._error(code),
        )

    def _error(self, code: FinishCode) -> str | None:
        match code:
            case FinishCode.FAULT:
                return FAULT_MESSAGE
            case FinishCode.DEADLINE:
                assert self.request.timeout_s is not None, f"{self.request.request_id}: it had no time limit"
                return f"the request's time limit of {self.request.timeout_s:g} s passed"
            case _:
                return None

    def _unknown_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        if self.request.sampling.prompt_logprobs is None:
            return None
        return [None] * len(self.prompt)

    def _take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Once, with the first token: by then every chunk of the prompt has been computed."""
        if self._prompt_logprobs is None:
            return None
        known, self._prompt_logprobs = tuple(self._prompt_logprobs), None
        assert all(entry is not None for entry in known[1:]), f"{self.request.request_id}: prompt log-probs have gaps"
        return known


class RecordBook:
    """All live requests, by id and by key. Indices are reused; a (index, generation) pair never is, so that the key of
    an ended request still names its pages. num_retained_max: so many of those keys are known; the oldest go first."""

    def __init__(self, num_retained_max: int = NUM_RETAINED_MAX) -> None:
        self._by_id: dict[str, Record] = {}
        self._by_index: list[Record | None] = []
        self._free_indices: list[int] = []
        self._generations: list[int] = []
        self._retained: dict[str, RequestKey] = {}
        self._num_retained_max = num_retained_max

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: EngineRequest, handle: int = 0) -> Record:
        """A record under a fresh key."""
        assert request.request_id not in self._by_id, f"request id {request.request_id!r} is live already"
        if not self._free_indices:
            self._free_indices.append(len(self._generations))
            self._generations.append(0)
            self._by_index.append(None)
        index = self._free_indices.pop()
        self._generations[index] += 1
        record = Record(request, RequestKey(index, self._generations[index]), handle)
        self._by_id[request.request_id] = record
        self._by_index[index] = record
        return record

    def find(self, request_id: str) -> Record | None:
        """The live request of that id, if there is one."""
        return self._by_id.get(request_id)

    def peek(self, key: RequestKey) -> Record | None:
        """The live request of that key; None when it ended while its step was in flight."""
        record = self._by_index[key.index]
        return None if record is None or record.key.generation != key.generation else record

    def get(self, key: RequestKey) -> Record:
        """The live request of that key, which must be there."""
        return self.at(key.index, key.generation)

    def at(self, index: int, generation: int) -> Record:
        """As get, by the parts of a key."""
        record = self._by_index[index]
        if record is None or record.key.generation != generation:
            raise AssertionError(f"no live request has key {RequestKey(index, generation)}")
        return record

    def find_retained(self, request_id: str) -> RequestKey | None:
        """The key of the request of that id if it asked to be kept, live or ended."""
        record = self._by_id.get(request_id)
        if record is None:
            return self._retained.get(request_id)
        return None if record.request.retain is None else record.key

    def retire(self, key: RequestKey, reason: FinishReason) -> Record:
        """Forget an ended request but, where its pages may have been kept, for its key."""
        record = self.remove(key)
        if record.request.retain is not None and reason in _KEPT:
            self._retained.pop(record.request.request_id, None)
            self._retained[record.request.request_id] = key
            while len(self._retained) > self._num_retained_max:
                del self._retained[next(iter(self._retained))]
        return record

    def forget_retained(self, request_id: str) -> None:
        """An ended request's pages are let go: its key is of no more use."""
        self._retained.pop(request_id, None)

    def remove(self, key: RequestKey) -> Record:
        """Forget the request; its index may be used again."""
        record = self.get(key)
        self._by_index[key.index] = None
        del self._by_id[record.request.request_id]
        self._free_indices.append(key.index)
        return record
