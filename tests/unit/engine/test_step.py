# SPDX-License-Identifier: Apache-2.0
"""The loop: order of calls, overlap, ends of every kind, log-probabilities, heartbeat."""

from __future__ import annotations

import msgspec
import pytest

from fakes import EOS, FakeControl, FakeMessages, FakeRunner
from tokenspeed.core.ipc import (
    STEP_TOKEN_BOUNDS,
    Cancel,
    EngineStats,
    Finish,
    Release,
    Retain,
    Shutdown,
    Submit,
    ToEngine,
    Updates,
)
from tokenspeed.core.plan import FinishCode
from tokenspeed.core.request import (
    ContentSpan,
    EngineRequest,
    FinishReason,
    Retention,
    SamplingParams,
    SequenceUpdate,
    pack_ids,
    unpack_ids,
)
from tokenspeed.engine.sequences import NUM_UNTOLD_MAX, RecordBook
from tokenspeed.engine.step import STATS_EVERY_MS, EngineLoop

KEEP = Retention("session", 30.0)


def request(request_id: str, prompt: str = "hi", *, max_tokens: int = 4, **fields: object) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, **fields)  # type: ignore[arg-type]
    return Submit(
        EngineRequest(
            request_id=request_id, token_ids=pack_ids([*prompt.encode()]), sampling=sampling, end_token_ids=(EOS,)
        ),
        handle_of(request_id),
    )


def handle_of(request_id: str) -> int:
    return int.from_bytes(request_id.encode()[-3:])


def updates_of(message: Updates) -> list[tuple[int, SequenceUpdate]]:
    """All news of a message, with the handles of the sequences."""
    token_ids, updates = list(message.token_ids), []
    for handle, count in zip(message.handles, message.counts or [1] * len(message.handles), strict=True):
        updates.append((handle, SequenceUpdate(request_id="", token_ids=tuple(token_ids[:count]))))
        del token_ids[:count]
    assert not token_ids
    return updates + [(handle_of(update.request_id), update) for update in message.updates]


class Harness:
    """A loop over fakes, and what it sent, by request."""

    def __init__(
        self, *turns: list[ToEngine], depth: int = 1, runner: FakeRunner | None = None, num_seats: int = 64
    ) -> None:
        self.control = FakeControl(num_seats)
        self.runner = runner or FakeRunner()
        self.messages = FakeMessages(list(turns))
        self.faults: list[Exception] = []
        self.now_ms = 1_000
        self.loop = EngineLoop(
            self.control,
            self.runner,
            self.messages,
            overlap_depth=depth,
            on_fault=self.faults.append,
            now_ms=lambda: self.now_ms,
        )

    def settle(self) -> Harness:
        """Turn until nothing is left to do."""
        for _ in range(200):
            if self.loop.turn(0.0) and not self.messages.turns:
                return self
        raise AssertionError("the loop does not settle")

    def send(self, *messages: ToEngine) -> Harness:
        """One more turn's messages, and what follows from them."""
        self.messages.turns.append(list(messages))
        return self.settle()

    def of(self, request_id: str) -> list[SequenceUpdate]:
        sent = [message for message in self.messages.sent if isinstance(message, Updates)]
        found = [each for message in sent for each in updates_of(message)]
        return [update for handle, update in found if handle == handle_of(request_id)]

    def ids(self, request_id: str) -> list[int]:
        return [token_id for update in self.of(request_id) for token_id in update.token_ids]


@pytest.mark.parametrize("depth", [0, 1])
def test_both_depths_give_the_same_tokens(depth: int) -> None:
    harness = Harness([request("a"), request("b", max_tokens=6)], depth=depth).settle()
    assert harness.ids("a") == [*b"abcd"]
    assert harness.ids("b") == [*b"abcdef"]
    assert harness.of("a")[-1].finish_reason is FinishReason.LENGTH
    assert harness.runner.max_in_flight == depth + 1
    assert harness.runner.num_in_flight == 0


def test_an_end_token_is_named_and_counted() -> None:
    runner = FakeRunner(next_token=lambda seating, count: EOS if count == 2 else 65)
    last = Harness([request("a", max_tokens=9)], runner=runner).settle().of("a")[-1]
    assert (last.token_ids, last.end_token_id, last.finish_reason) == ((EOS,), EOS, FinishReason.STOP)


def test_cancel_ends_a_request_and_frees_its_id() -> None:
    harness = Harness([request("a", max_tokens=100)], [], [Cancel("a")]).settle()
    assert harness.of("a")[-1].finish_reason is FinishReason.CANCELLED
    assert harness.control.stats().num_running == 0
    harness.messages.turns.append([request("a", max_tokens=2)])
    assert harness.settle().of("a")[-1].finish_reason is FinishReason.LENGTH


def test_cancel_and_finish_cross_with_the_end() -> None:
    """Unknown ids, second cancels and a cancel after finish are ignored."""
    turns: list[list[ToEngine]] = [
        [Cancel("nobody"), Finish("nobody", 1)],
        [request("a", max_tokens=100)],
        [Finish("a", 1), Cancel("a"), Finish("a", 1)],
        [Cancel("a")],
    ]
    harness = Harness(*turns).settle()
    ends = [update.finish_reason for update in harness.of("a") if update.finish_reason is not None]
    assert ends == [FinishReason.STOP]
    assert harness.of("a")[-1].end_token_id is None


def test_keys_are_never_reused() -> None:
    harness = Harness([request("a", max_tokens=1)]).settle()
    harness.messages.turns.append([request("b", max_tokens=1)])
    harness.settle()
    first, second = harness.control.seen_keys
    assert first.index == second.index and first.generation != second.generation


def test_a_faulty_row_ends_its_request_only() -> None:
    runner = FakeRunner(faulty=frozenset({"bad"}))
    harness = Harness([request("bad"), request("good")], runner=runner).settle()
    assert harness.of("bad")[-1].finish_reason is FinishReason.ERROR
    assert "NaN" in (harness.of("bad")[-1].error or "")
    assert harness.ids("good") == [*b"abcd"]


def test_a_broken_step_ends_its_requests_and_not_the_engine() -> None:
    runner = FakeRunner(broken=frozenset({"bad"}))
    harness = Harness([request("bad"), request("beside")], runner=runner).settle()
    assert harness.of("bad")[-1].finish_reason is FinishReason.ERROR
    assert harness.of("beside")[-1].finish_reason is FinishReason.ERROR
    assert [str(fault) for fault in harness.faults][:1] == ["the step broke"]
    harness.messages.turns.append([request("after")])
    assert harness.settle().ids("after") == [*b"abcd"]


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    harness = Harness([request("big", "x" * 20_000), request("a")]).settle()
    assert "20001" in (harness.of("big")[-1].error or "") and "10000" in (harness.of("big")[-1].error or "")
    assert harness.ids("a") == [*b"abcd"]


def test_logprobs_travel_beside_their_tokens() -> None:
    harness = Harness([request("a", logprobs=1), request("b")]).settle()
    entries = [entry for update in harness.of("a") for entry in update.logprobs or ()]
    assert [entry.token_id for entry in entries] == [*b"abcd"]
    assert all(update.logprobs is None for update in harness.of("b"))


def test_prompt_logprobs_come_once_and_whole() -> None:
    updates = Harness([request("a", "xyz", prompt_logprobs=0)]).settle().of("a")
    _, first, *rest = updates
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    assert [entry.token_id for entry in first.prompt_logprobs[1:] if entry] == [*b"yz"]
    assert all(update.prompt_logprobs is None for update in rest)


def test_a_seating_carries_what_execution_needs() -> None:
    forced = request("a").request
    forced = EngineRequest(
        request_id="a",
        token_ids=forced.token_ids,
        sampling=forced.sampling,
        end_token_ids=(EOS,),
        forced_token_ids=pack_ids([*b"xyz"]),
    )
    harness = Harness([Submit(forced, handle_of("a"))]).settle()
    (seating,) = harness.runner.seatings
    assert (seating.token_ids.tolist(), seating.prompt_len) == (unpack_ids(forced.token_ids), 2)
    assert harness.ids("a")[:3] == [*b"xyz"]


def test_idle_waits_and_reports() -> None:
    """No busy loop: with nothing to do, receive is told to wait; each turn still reports."""
    harness = Harness([request("a", max_tokens=1)], [], [], [Shutdown()])
    harness.loop.run()
    assert harness.messages.waits[0] > 0 and harness.messages.waits[-1] > 0
    assert harness.messages.sent[-1] == Updates(stats=harness.messages.sent[-1].stats)  # type: ignore[union-attr]


def test_counters_come_with_news_and_in_their_time() -> None:
    """Tokens alone bring none, but where the last ones are old or the API process has said something."""
    harness = Harness([request("a", max_tokens=100)])

    def told(ms_later: int, *messages: ToEngine) -> EngineStats | None:
        harness.now_ms += ms_later
        harness.messages.turns.append(list(messages))
        harness.loop.turn(0.0)
        (*_, last) = harness.messages.sent
        assert isinstance(last, Updates) and len(last.handles) == 1
        return last.stats

    while not (harness.messages.sent and harness.messages.sent[-1].handles):  # type: ignore[union-attr]
        harness.loop.turn(0.0)
    told(STATS_EVERY_MS)
    assert told(STATS_EVERY_MS - 1) is None
    due = told(1)
    assert due is not None and due.num_running == 1
    assert told(1) is None
    assert told(1, Cancel("nobody")) is not None
    harness.send(Cancel("a"))
    last = harness.messages.sent[-1]
    assert isinstance(last, Updates) and last.stats is not None and last.stats.num_running == 0


def test_one_message_a_step() -> None:
    harness = Harness([request("a"), request("b"), request("c")]).settle()
    sent = [updates_of(message) for message in harness.messages.sent if isinstance(message, Updates)]
    assert [len(updates) for updates in sent if updates] == [3, 3, 3, 3, 3], "and one when the first step begins"


@pytest.mark.parametrize("depth", [0, 1])
def test_the_loop_never_sleeps_while_a_request_waits_for_what_a_result_frees(depth: int) -> None:
    harness = Harness([request("a"), request("b"), request("c")], depth=depth, num_seats=1)
    for _ in range(200):
        slept = harness.loop.turn(0.0)
        ended = all(updates and updates[-1].finish_reason for updates in map(harness.of, "abc"))
        assert ended or not slept, "asleep with work to do"
        if ended:
            return
    raise AssertionError("the requests do not end")


def with_fields(submit: Submit, **fields: object) -> Submit:
    return Submit(msgspec.structs.replace(submit.request, **fields))


def test_what_a_request_asks_reaches_the_control_plane() -> None:
    spans = (ContentSpan(0, 1, 2, 3),)
    asked = with_fields(request("a"), adapter="lora", spans=spans, retain=KEEP, timeout_s=2.5)
    harness = Harness([asked, request("b")]).settle()
    first, second = harness.control.submitted
    assert first == {"adapter": "lora", "spans": spans, "retain": KEEP, "deadline_ms": 1_000 + 2_500}
    assert second == {"adapter": "", "spans": (), "retain": None, "deadline_ms": None}


def test_a_request_ends_with_its_time() -> None:
    harness = Harness([with_fields(request("a", max_tokens=1_000), timeout_s=2.5), request("b", max_tokens=1_000)], [])
    harness.loop.turn(0.0)
    harness.now_ms += 2_500
    harness.loop.turn(0.0)
    last = harness.of("a")[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "the request's time limit of 2.5 s passed"
    assert harness.of("b")[-1].finish_reason is None


def test_holds_are_told_by_the_key_of_the_ended_request() -> None:
    """Also when its index was taken by another request meanwhile."""
    harness = Harness([with_fields(request("a", max_tokens=1), retain=KEEP)]).settle()
    harness.send(request("b", max_tokens=1))
    first, second = harness.control.seen_keys
    assert first.index == second.index
    harness.now_ms = 5_000
    harness.send(Retain("a", 1.5), Release("a"))
    assert harness.control.holds == [(first, 6_500), (first, None)]
    harness.send(Retain("a", 1.5), Release("a"))
    assert len(harness.control.holds) == 2, "a released request is forgotten"


def test_holds_may_be_told_before_the_end() -> None:
    harness = Harness([with_fields(request("a", max_tokens=100), retain=KEEP)], [Retain("a", 1.0)], [Release("a")])
    harness.settle()
    (key,) = harness.control.seen_keys
    assert harness.control.holds == [(key, 2_000), (key, None)]


def test_only_requests_that_ended_well_and_asked_for_it_are_held() -> None:
    """Nothing is said of others, nor of ids that nobody knows."""
    bad = FakeRunner(faulty=frozenset({"bad"}))
    harness = Harness(
        [
            request("plain", max_tokens=1),
            with_fields(request("bad"), retain=KEEP),
            with_fields(request("gone", max_tokens=100), retain=KEEP),
            request("live", max_tokens=50),
        ],
        [Cancel("gone"), Retain("live", 1.0), Release("live")],
        runner=bad,
    ).settle()
    harness.send(*(Retain(name, 1.0) for name in ("plain", "bad", "gone", "nobody")))
    harness.send(*(Release(name) for name in ("plain", "bad", "gone", "nobody")))
    assert harness.control.holds == []


def test_a_request_that_a_stop_string_ended_is_held() -> None:
    harness = Harness([with_fields(request("a", max_tokens=100), retain=KEEP)], [], [Finish("a", 1)]).settle()
    harness.send(Release("a"))
    assert harness.control.holds == [(harness.control.seen_keys[0], None)]


def test_of_the_ended_requests_the_oldest_are_forgotten() -> None:
    book = RecordBook(num_retained_max=2)
    for name in ("a", "b", "a", "c"):
        book.retire(book.add(with_fields(request(name), retain=KEEP).request).key, FinishReason.STOP)
    assert [book.find_retained(name) is not None for name in ("a", "b", "c")] == [True, False, True]


@pytest.mark.parametrize("depth", [0, 1])
def test_transfers_are_acknowledged_once_whatever_becomes_of_them(depth: int) -> None:
    harness = Harness([request("a")], depth=depth, runner=FakeRunner(lost=frozenset({8})))
    harness.control.moves = [([7, 7], [8]), ([], [9])]
    harness.settle()
    told = [entry for entry in harness.control.transfers if entry != "advance"]
    assert told == [(7, True), (8, False), (9, True)]
    assert harness.ids("a") == [*b"abcd"]


def test_transfers_are_told_before_the_result_of_their_step() -> None:
    harness = Harness([request("a", max_tokens=1)])
    harness.control.moves = [([7], [])]
    assert harness.settle().control.transfers == [(7, True), "advance"]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_broken_step_loses_its_transfers(depth: int) -> None:
    harness = Harness([request("a", max_tokens=1)], depth=depth, runner=FakeRunner(broken=frozenset({8})))
    harness.control.moves = [([7, 7], [8])]
    harness.settle()
    assert harness.control.transfers == [(7, False), (8, False), "advance"]
    assert harness.of("a")[-1].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("depth", [0, 1])
def test_a_plan_without_rows_is_launched_and_never_slept_over(depth: int) -> None:
    harness = Harness(depth=depth)
    harness.control.moves = [([7], []), ([8], [])]
    slept = [harness.loop.turn(0.0) for _ in range(5)]
    assert slept == ([False, False, True, True, True] if depth == 0 else [False, False, False, True, True])
    assert harness.control.num_steps == 2 and harness.runner.max_in_flight == depth + 1
    assert [entry for entry in harness.control.transfers if entry != "advance"] == [(7, True), (8, True)]


def test_a_late_transfer_is_looked_for_and_never_slept_over() -> None:
    """Nothing runs, so no step's output can tell of it. No heartbeat either until it has ended."""
    harness = Harness(runner=FakeRunner(late=frozenset({7, 8})), depth=0)
    harness.control.moves = [([7], [8])]
    slept = [harness.loop.turn(0.0) for _ in range(5)]
    assert slept == [False, False, True, True, True]
    assert harness.control.transfers == ["advance", (7, True), (8, True)]
    assert harness.messages.waits == [0.0, 0.0, 0.001, 0.0, 0.0]


def test_a_sequence_tells_once_and_before_its_first_token_how_long_it_waited() -> None:
    harness = Harness([request("a", max_tokens=3), request("b", max_tokens=3)], num_seats=1).settle()
    waits = {name: [update.queue_s for update in harness.of(name)] for name in "ab"}
    for name, told in waits.items():
        assert [wait is None for wait in told] == [False, True, True, True], told
        assert not harness.of(name)[0].token_ids, "it is told when the step begins, not when it ends"
    assert 0.0 <= waits["a"][0] < waits["b"][0], "b waited until a was done"  # type: ignore[operator]


def test_each_step_is_counted_by_its_tokens() -> None:
    harness = Harness([request("a", "x" * 20, max_tokens=3), request("b", "y" * 13, max_tokens=3)]).settle()
    stats = [message.stats for message in harness.messages.sent if isinstance(message, Updates)][-1]
    assert stats.num_step_tokens == 20 + 13 + 2 * 2
    assert {bound: count for bound, count in zip(STEP_TOKEN_BOUNDS, stats.step_tokens, strict=False) if count} == {
        2: 2,
        64: 1,
    }
    assert sum(stats.step_tokens) == harness.control.num_steps


def test_further_tokens_go_by_handle_and_all_else_by_name() -> None:
    harness = Harness([request("a", max_tokens=3), request("b", max_tokens=3, logprobs=1)]).settle()
    sent = [message for message in harness.messages.sent if isinstance(message, Updates)]
    by_handle = [message for message in sent if message.handles]
    assert [message.handles for message in by_handle] == [[handle_of("a")]]
    assert (by_handle[0].token_ids, by_handle[0].counts) == ([ord("b")], [])
    named = [(update.request_id, update.token_ids) for message in sent for update in message.updates]
    assert [ids for name, ids in named if name == "a"] == [(), (ord("a"),), (ord("c"),)], "the first, and the end"
    assert len([ids for name, ids in named if name == "b" and ids]) == 3, "log-probabilities are more than tokens"


def test_tokens_that_nobody_waits_for_come_with_other_news() -> None:
    """The first at once, the rest with the end, whichever that is; others beside it get theirs at once."""
    asked = with_fields(request("a", max_tokens=6), tells_at_end=True)
    harness = Harness([Submit(asked.request, handle_of("a")), request("b", max_tokens=6)]).settle()
    assert [update.token_ids for update in harness.of("a")] == [(), (97,), (98, 99, 100, 101, 102)]
    assert [len(update.token_ids) for update in harness.of("b")] == [0, 1, 1, 1, 1, 1, 1]
    last = harness.of("a")[-1]
    assert (last.finish_reason, last.cached_len) == (FinishReason.LENGTH, 0)
    asked = with_fields(request("c", max_tokens=100), tells_at_end=True)
    harness = Harness([Submit(asked.request, handle_of("c"))], [], [], [Cancel("c")]).settle()
    assert len(harness.ids("c")) > 1 and harness.of("c")[-1].finish_reason is FinishReason.CANCELLED


def test_tokens_that_wait_for_the_end_are_not_too_many() -> None:
    record = RecordBook().add(with_fields(request("a", max_tokens=9), tells_at_end=True).request, 7)
    assert record.add([1], 0, 0) is None
    record.update([1], 0, 0)
    told = [record.add([token_id], 0, 0) for token_id in range(NUM_UNTOLD_MAX + 1)]
    assert told == [*([[]] * (NUM_UNTOLD_MAX - 1)), [*range(NUM_UNTOLD_MAX)], []]
    assert record.add([EOS], int(FinishCode.STOP), 0) is None
    last = record.update([EOS], int(FinishCode.STOP), 0)
    assert (last.token_ids, last.end_token_id) == ((NUM_UNTOLD_MAX, EOS), EOS)


def test_an_engine_tells_that_it_lives_while_it_tells_no_token() -> None:
    asked = with_fields(request("a", max_tokens=1_000), tells_at_end=True)
    harness = Harness([Submit(asked.request, handle_of("a"))], [], [], [])
    for _ in range(4):
        harness.loop.turn(0.0)
    num_sent = len(harness.messages.sent)
    harness.loop.turn(0.0)
    assert len(harness.messages.sent) == num_sent
    harness.now_ms += STATS_EVERY_MS
    harness.loop.turn(0.0)
    (*_, last) = harness.messages.sent
    assert len(harness.messages.sent) == num_sent + 1
    assert isinstance(last, Updates) and last.stats is not None and last.stats.num_running == 1


def test_a_cached_length_that_changes_is_told() -> None:
    record = RecordBook().add(request("a", max_tokens=9).request, 7)
    assert record.add([1], 0, 16) is None
    assert record.update([1], 0, 16).cached_len == 16
    assert record.add([2], 0, 16) == [2]
    assert record.add([3], 0, 32) is None
    assert record.update([3], 0, 32).cached_len == 32
    assert record.add([4, 5], 0, 32) == [4, 5]
    assert record.add([], 0, 32) is None
    assert record.seating(0).token_ids.tolist()[-5:] == [1, 2, 3, 4, 5]
