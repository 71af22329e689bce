# SPDX-License-Identifier: Apache-2.0
"""Ends, preemption, faults and steps in flight: no request and no block is lost, whatever comes when."""

from __future__ import annotations

import pytest

from tokenspeed.control import CheckError
from tokenspeed.core.plan import FinishCode, RequestKey, RowKind
from tokenspeed.core.request import Retention


def assert_idle(driver):
    driver.run()
    stats = driver.plane.stats()
    assert (stats.num_running, stats.num_waiting, stats.used_blocks) == (0, 0, 0)
    assert not driver.plane.has_work()


def test_a_small_pool_under_many_requests_preempts_and_finishes_all(new_driver, depth, after):
    driver = new_driver(depth, num_blocks=64, max_num_seqs=32, max_num_batched_tokens=256)
    prompts = {index: list(range(index * 50, index * 50 + 40 + index)) for index in range(32)}
    for index, prompt in prompts.items():
        driver.submit(index, prompt, 60)
    driver.run()
    for index, prompt in prompts.items():
        assert driver.sequences[RequestKey(index, 0)].generated == after(prompt, 60), index
    assert driver.plane.stats().num_preemptions > 0
    assert_idle(driver)


def test_the_last_to_come_gives_way_and_resumes_with_what_it_said(new_driver, depth, after):
    driver = new_driver(depth, num_blocks=5, max_model_len=200)
    first = driver.submit(0, range(100, 131), 40)
    second = driver.submit(1, range(200, 215), 30)
    driver.run()
    assert driver.sequences[first].num_seatings == 1
    assert driver.sequences[second].num_seatings > 1
    assert driver.sequences[second].generated == after(list(range(200, 215)), 30)
    assert driver.finished[0] == first


def test_a_later_class_gives_way_even_if_it_came_first(new_driver):
    driver = new_driver(num_blocks=5, max_model_len=200)
    later = driver.submit(0, range(100, 131), 40, priority=1)
    driver.step()
    sooner = driver.submit(1, range(200, 215), 40)
    driver.run()
    assert driver.sequences[sooner].num_seatings == 1
    assert driver.sequences[later].num_seatings > 1


def test_the_first_in_line_gets_on_at_every_step(new_driver, depth):
    driver = new_driver(depth, num_blocks=12, max_num_seqs=8, max_model_len=150)
    first = driver.submit(0, range(10), 120)
    for index in range(1, 8):
        driver.submit(index, range(100 * index, 100 * index + 20), 100)
    stalls = 0
    while driver.sequences[first].finish is FinishCode.NONE:
        before = len(driver.sequences[first].generated)
        driver.step()
        stalls = stalls + 1 if len(driver.sequences[first].generated) == before else 0
        assert stalls <= 3
    driver.run()
    assert len(driver.finished) == 8


def start_prefill(driver, key):
    driver.step()
    assert driver.plans[-1][-1][1] == RowKind.PREFILL


def start_prefill_in_flight(driver, key):
    driver.apply()
    driver.plan()


def start_decode(driver, key):
    while not driver.sequences[key].generated:
        driver.step()


def start_decode_in_flight(driver, key):
    start_decode(driver, key)
    driver.plan()


def stay_queued(driver, key):
    driver.apply()


STATES = [stay_queued, start_prefill, start_prefill_in_flight, start_decode, start_decode_in_flight]


@pytest.mark.parametrize("reach", STATES)
def test_cancel_takes_effect_in_every_state(new_driver, reach):
    driver = new_driver()
    key = driver.submit(0, range(150), 50)
    reach(driver, key)
    driver.plane.cancel(key)
    driver.apply()
    assert driver.sequences[key].finish is FinishCode.CANCELLED
    assert all(row[0] != 0 for row in (driver.plan() or _Empty).rows)
    assert_idle(driver)


class _Empty:
    rows = ()


def test_cancel_of_a_preempted_request(new_driver, depth):
    driver = new_driver(depth, num_blocks=5, max_model_len=200)
    driver.submit(0, range(100, 131), 40)
    victim = driver.submit(1, range(200, 215), 40)
    while driver.plane.stats().num_preemptions == 0:
        driver.step()
    driver.plane.cancel(victim)
    driver.apply()
    assert driver.sequences[victim].finish is FinishCode.CANCELLED
    assert_idle(driver)


@pytest.mark.parametrize("reach", [start_decode, start_decode_in_flight])
def test_finish_with_a_step_in_flight_drops_what_comes_after(new_driver, reach):
    driver = new_driver()
    key = driver.submit(0, range(30), 50)
    reach(driver, key)
    generated = list(driver.sequences[key].generated)
    driver.plane.finish(key, len(generated))
    driver.apply()
    assert driver.sequences[key].finish is FinishCode.STOP
    assert_idle(driver)
    assert driver.sequences[key].generated == generated


def test_blocks_and_seat_stay_until_the_step_in_flight_retires(new_driver):
    driver = new_driver(num_blocks=4, max_num_seqs=1)
    key = driver.submit(0, range(60), 50)
    driver.apply()
    driver.plan()
    driver.plane.cancel(key)
    driver.submit(1, range(500, 520), 2)
    driver.apply()
    assert driver.plane.stats().used_blocks == 4
    assert driver.plan() is None
    assert driver.plane.has_work()
    driver.advance()
    assert driver.plane.stats().used_blocks == 0
    driver.run()
    assert driver.finished == [key, RequestKey(1, 0)]


def test_a_step_in_flight_is_not_planned_past_a_certain_end(new_driver):
    driver = new_driver(1)
    key = driver.submit(0, range(30), 1)
    driver.apply()
    assert driver.plan() is not None
    assert driver.plan() is None
    driver.run()
    assert len(driver.sequences[key].generated) == 1


def test_at_most_two_steps_are_in_flight(new_driver):
    driver = new_driver(1)
    driver.submit(0, range(30), 9)
    driver.apply()
    driver.plan()
    driver.plan()
    with pytest.raises(CheckError, match="in flight"):
        driver.plane.next_plan()


def test_decode_is_planned_on_a_token_that_is_still_in_flight(new_driver):
    driver = new_driver(1)
    driver.submit(0, range(30), 9)
    driver.apply()
    driver.plan()
    rows = driver.plan().rows.tolist()
    assert [row[1:4] for row in rows] == [[RowKind.DECODE, 30, 1]]


def test_a_row_fault_ends_that_request_only(new_driver, depth):
    driver = new_driver(depth)
    bad = driver.submit(0, range(30), 20)
    good = driver.submit(1, range(30, 60), 20)
    start_decode(driver, bad)
    driver.bad_rows = {bad}
    driver.run()
    assert driver.sequences[bad].finish is FinishCode.FAULT
    assert driver.sequences[good].finish is FinishCode.LENGTH
    assert_idle(driver)


def test_nothing_that_a_faulted_step_wrote_ever_matches(new_driver):
    driver = new_driver(max_num_batched_tokens=32)
    key = driver.submit(0, range(90), 20)
    driver.step()
    driver.bad_step = True
    driver.step()
    driver.bad_step = False
    assert driver.sequences[key].finish is FinishCode.FAULT
    again = driver.submit(0, range(90), 20, generation=1)
    driver.run()
    assert driver.sequences[again].cached_len == 32
    assert_idle(driver)


def test_a_faulted_step_ends_all_its_requests_and_no_other(new_driver):
    driver = new_driver(max_num_seqs=2)
    keys = [driver.submit(index, [index + 9] * 20, 5) for index in range(3)]
    driver.bad_step = True
    driver.step()
    driver.bad_step = False
    driver.run()
    assert [driver.sequences[key].finish for key in keys] == [FinishCode.FAULT, FinishCode.FAULT, FinishCode.LENGTH]


def test_a_late_result_never_reaches_the_next_user_of_an_index(new_driver, after):
    driver = new_driver()
    old = driver.submit(0, range(30), 20)
    start_decode_in_flight(driver, old)
    driver.plane.cancel(old)
    driver.apply()
    new = driver.submit(0, range(40, 70), 4, generation=1)
    driver.apply()
    driver.advance()
    assert driver.sequences[new].generated == []
    driver.run()
    assert driver.sequences[new].generated == after(list(range(40, 70)), 4)


def test_events_for_an_earlier_generation_leave_the_index_alone(new_driver):
    driver = new_driver()
    old = driver.submit(0, range(30), 1)
    driver.run()
    new = driver.submit(0, range(30), 3, generation=1)
    driver.apply()
    driver.plane.cancel(old)
    driver.plane.finish(old, 0)
    driver.plane.retain(old, 100)
    driver.plane.release(old)
    driver.run()
    assert driver.sequences[new].finish is FinishCode.LENGTH
    driver.submit(0, range(3), generation=1)
    with pytest.raises(CheckError, match="latest generation"):
        driver.apply()


def test_a_crowded_cache_counts_shared_blocks_once(new_driver, depth):
    driver = new_driver(depth, num_blocks=12, max_num_seqs=6, max_model_len=150)
    driver.submit(0, range(96), 1)
    driver.run()
    for index in range(1, 6):
        driver.submit(index, [*range(96), *range(1000 * index, 1000 * index + 4)], 20)
    driver.run()
    cached = [driver.sequences[RequestKey(index, 0)].cached_len for index in range(1, 6)]
    assert cached[:2] == [96, 96]
    assert_idle(driver)


def test_one_block_in_want_takes_one_victim(new_driver, depth):
    driver = new_driver(depth, num_blocks=9, max_num_batched_tokens=128, max_model_len=200)
    for index, prompt_len in enumerate([36, 30, 30]):
        driver.submit(index, range(100 * index, 100 * index + prompt_len), 30)
    # The first wants its fourth block when the others have three each, and the pool is full.
    while driver.plane.stats().num_preemptions == 0:
        assert driver.step() is not None
    stats = driver.plane.stats()
    assert (stats.num_preemptions, stats.num_running, stats.num_waiting) == (1, 2, 1)
    assert_idle(driver)
    assert driver.sequences[RequestKey(1, 0)].num_seatings == 1


def hold(driver, index, prompt, *, ttl_s=10.0, priority=0, session="s", max_new=2):
    """A turn that has ended and is held."""
    retain = Retention(session, ttl_s, priority)
    key = driver.submit(index, prompt, max_new, retain=retain)
    driver.run()
    assert driver.sequences[key].finish is FinishCode.LENGTH
    return key


def test_a_held_request_has_ended_and_keeps_its_pages(new_driver, depth):
    driver = new_driver(depth)
    key = hold(driver, 0, range(64))
    stats = driver.plane.stats()
    assert (stats.num_held, stats.used_blocks, stats.num_running) == (1, 4, 0)
    assert not driver.plane.has_work()
    other = driver.submit(0, range(500, 520), 2, generation=1)  # the index is free, the old key stays valid
    driver.run()
    assert driver.sequences[other].finish is FinishCode.LENGTH
    driver.plane.release(key)
    driver.apply()
    stats = driver.plane.stats()
    assert (stats.num_held, stats.used_blocks) == (0, 0)


@pytest.mark.parametrize(("now_ms", "num_held"), [(9_999, 1), (10_000, 0)])
def test_a_hold_ends_with_its_time_to_live(new_driver, now_ms, num_held):
    driver = new_driver()
    hold(driver, 0, range(64), ttl_s=10.0)
    driver.plane.tick(now_ms)
    driver.apply()
    assert driver.plane.stats().num_held == num_held
    assert driver.plane.stats().used_blocks == 4 * num_held


@pytest.mark.parametrize("when", ["before the end", "after the end"])
@pytest.mark.parametrize("deadline_ms", [3_000, 30_000])
def test_retain_moves_the_end_of_a_hold(new_driver, when, deadline_ms):
    driver = new_driver()
    key = driver.submit(0, range(64), 4, retain=Retention("s", 10.0))
    driver.step()
    if when == "after the end":
        driver.run()
    driver.plane.retain(key, deadline_ms)
    driver.run()
    for now_ms, num_held in ((deadline_ms - 1, 1), (deadline_ms, 0)):
        driver.plane.tick(now_ms)
        driver.apply()
        assert driver.plane.stats().num_held == num_held


def test_release_before_the_end_leaves_nothing_held(new_driver, depth):
    driver = new_driver(depth)
    key = driver.submit(0, range(64), 4, retain=Retention("s", 10.0))
    driver.step()
    driver.plane.release(key)
    driver.run()
    assert (driver.plane.stats().num_held, driver.plane.stats().used_blocks) == (0, 0)


def test_the_next_turn_takes_over_what_its_session_holds(new_driver, depth):
    driver = new_driver(depth)
    key = hold(driver, 0, range(64))
    history = [*range(64), *driver.sequences[key].generated]
    turn = driver.submit(1, [*history, *range(900, 950)], 2, retain=Retention("s", 10.0))
    driver.run()
    assert driver.sequences[turn].cached_len == 64
    assert driver.plane.stats().num_held == 1  # its own; the first turn's hold is superseded
    assert driver.plane.stats().used_blocks == (len(history) + 50 + 1) // 16


def test_a_fork_leaves_the_hold_of_another_session_alone(new_driver):
    driver = new_driver()
    key = hold(driver, 0, range(64), session="parent")
    child = driver.submit(1, [*range(64), *range(900, 950)], 2, retain=Retention("child", 10.0))
    driver.run()
    assert driver.sequences[child].cached_len == 64
    assert driver.plane.stats().num_held == 2
    driver.plane.release(key)
    driver.apply()
    assert driver.plane.stats().used_blocks == 7  # the shared four are the child's now


def test_pressure_takes_the_least_urgent_hold_first(new_driver):
    driver = new_driver(num_blocks=12, max_model_len=200)
    hold(driver, 0, range(100, 164), priority=0, session="kept")
    hold(driver, 1, range(200, 264), priority=5, session="goes")
    driver.submit(2, range(300, 380), 2)
    driver.run()
    assert driver.plane.stats().num_held == 1
    for index, start, cached in ((3, 100, 48), (4, 200, None)):
        key = driver.submit(index, range(start, start + 64), 1)
        driver.run()
        assert cached is None or driver.sequences[key].cached_len == cached


def test_a_finish_holds_only_what_it_keeps(new_driver, depth):
    driver = new_driver(depth)
    key = driver.submit(0, range(60), 60, retain=Retention("s", 10.0))
    while len(driver.sequences[key].generated) < 40:
        driver.step()
    driver.plane.finish(key, 5)
    driver.run()
    assert driver.plane.stats().num_held == 1
    assert driver.plane.stats().used_blocks == 65 // 16


@pytest.mark.parametrize("reach", STATES)
def test_a_deadline_ends_a_request_in_every_state(new_driver, reach):
    driver = new_driver()
    key = driver.submit(0, range(150), 50, deadline_ms=100)
    reach(driver, key)
    driver.plane.tick(99)
    driver.apply()
    assert driver.sequences[key].finish is FinishCode.NONE
    driver.plane.tick(100)
    driver.apply()
    assert driver.sequences[key].finish is FinishCode.DEADLINE
    assert_idle(driver)


@pytest.mark.parametrize("end", ["cancel", "fault"])
def test_only_a_good_end_is_held(new_driver, end):
    driver = new_driver()
    key = driver.submit(0, range(30), 50, retain=Retention("s", 10.0))
    start_decode(driver, key)
    if end == "cancel":
        driver.plane.cancel(key)
    else:
        driver.bad_rows = {key}
    driver.run()
    assert driver.plane.stats().num_held == 0
    assert_idle(driver)
