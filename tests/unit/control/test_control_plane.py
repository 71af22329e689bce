# SPDX-License-Identifier: Apache-2.0
"""Plans of the control plane: chunks, order, budget, prefix cache, limits, and the contract of its arrays."""

from __future__ import annotations

import numpy as np
import pytest

from tokenspeed.control import CheckError
from tokenspeed.core.plan import (
    CacheGroup,
    FinishCode,
    GroupKind,
    HostStore,
    KvEventKind,
    KvTier,
    RequestKey,
    RowField,
    RowKind,
    StepResult,
)
from tokenspeed.core.request import ContentSpan

END = 1


def kinds(rows):
    return [RowKind(row[RowField.KIND]) for row in rows]


def test_prompt_is_computed_in_chunks(new_driver, after):
    driver = new_driver(max_num_batched_tokens=32)
    key = driver.submit(0, range(10, 80), 2)
    driver.run()
    assert [row[1:4] for rows in driver.plans for row in rows] == [
        [RowKind.PREFILL, 0, 32],
        [RowKind.PREFILL, 32, 32],
        [RowKind.PREFILL_LAST, 64, 6],
        [RowKind.DECODE, 70, 1],
    ]
    assert driver.sequences[key].generated == after(list(range(10, 80)), 2)
    assert driver.sequences[key].finish is FinishCode.LENGTH


def test_decode_rows_come_first_and_keep_their_tokens_of_the_budget(new_driver):
    driver = new_driver(max_num_batched_tokens=32)
    talking = [driver.submit(index, [7 + index] * 4, 200) for index in range(3)]
    driver.step()
    driver.submit(3, range(1000, 1300), 4)
    for _ in range(8):
        before = [len(driver.sequences[key].generated) for key in talking]
        rows = driver.step().rows.tolist()
        assert kinds(rows)[:3] == [RowKind.DECODE] * 3
        assert sum(row[RowField.QUERY_LEN] for row in rows) == 32
        assert [len(driver.sequences[key].generated) for key in talking] == [count + 1 for count in before]


@pytest.mark.parametrize(("bound", "beside_decodes"), [(None, 29), (10, 10), (1, 1), (29, 29), (4096, 29)])
def test_a_step_that_decodes_has_no_more_prompt_tokens_than_it_may(new_driver, depth, after, bound, beside_decodes):
    driver = new_driver(depth, max_num_batched_tokens=32, max_num_mixed_prefill_tokens=bound)
    talking = [driver.submit(index, [7 + index] * 4, 12) for index in range(3)]
    while not all(driver.sequences[key].generated for key in talking):
        driver.step()
    late = driver.submit(3, range(1000, 1300), 4)
    started = len(driver.plans)
    driver.run()
    mixed, alone = [], []
    for rows in driver.plans[started:]:
        prompt = [row[RowField.QUERY_LEN] for row in rows if row[RowField.KIND] != RowKind.DECODE]
        decodes = len(prompt) < len(rows)
        if prompt and not any(row[RowField.KIND] == RowKind.PREFILL_LAST for row in rows):
            (mixed if decodes else alone).append(sum(prompt))
    assert mixed and set(mixed) == {beside_decodes}
    assert set(alone) <= {32}
    assert alone or bound not in (1, 10), "the whole step for prompts once nobody decodes"
    assert driver.sequences[late].generated == after(list(range(1000, 1300)), 4)


def test_what_waits_decides_how_much_of_it_a_step_that_decodes_takes(new_driver):
    driver = new_driver(max_num_batched_tokens=64, max_num_mixed_prefill_tokens=50, mixed_step_unit=16)
    driver.submit(0, range(9), 90)
    driver.step()
    driver.submit(1, range(1000, 1100), 1)
    assert [row[3] for row in driver.step().rows.tolist()] == [1, 15]
    for index in (2, 3, 4, 5):
        driver.submit(index, range(1000 * index, 1000 * index + 190), 1)
    rows = [[row[3] for row in driver.step().rows.tolist()] for _ in range(3)]
    assert rows == [[1, 50], [1, 35, 15], [1, 47]], "at most what is allowed, and less again as the queue is worked off"


def test_prompts_share_what_a_step_that_decodes_may_have_in_order(new_driver):
    driver = new_driver(max_num_mixed_prefill_tokens=12)
    driver.submit(0, range(9), 90)
    driver.step()
    for index in (1, 2, 3):
        driver.submit(index, range(1000 * index, 1000 * index + 10), 1)
    rows = [[row[3] for row in driver.step().rows.tolist()] for _ in range(3)]
    assert rows == [[1, 10, 2], [1, 8, 4], [1, 6]]


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_ten_turns_compute_only_what_is_new_and_one_block(new_driver, depth, block_size):
    driver = new_driver(depth, block_size=block_size)
    history = list(range(100, 137))
    for turn in range(10):
        num_new = len(history) if turn == 0 else 23
        key = driver.submit(0, history, 31, generation=turn)
        driver.run()
        sequence = driver.sequences[key]
        computed = len(history) - sequence.cached_len
        assert computed <= num_new + block_size
        assert sequence.computed <= computed + 31
        history += [*sequence.generated, *range(5000 + turn * 23, 5000 + turn * 23 + 23)]
        assert turn == 0 or sequence.cached_len > 0


def test_a_fully_cached_prompt_still_computes_a_token_of_its_own(new_driver):
    driver = new_driver()
    prompt = list(range(64))
    for generation in range(2):
        driver.submit(0, prompt, 1, generation=generation)
        driver.run()
    again = driver.sequences[RequestKey(0, 1)]
    assert again.cached_len == 48
    assert again.computed == 16


def test_a_block_is_shared_only_when_the_whole_prefix_is_the_same(new_driver):
    driver = new_driver()
    driver.submit(0, range(64), 1)
    driver.run()
    for generation, prompt in enumerate(([*range(40), *range(900, 924)], [999, *range(1, 64)]), start=1):
        driver.submit(0, prompt, 1, generation=generation)
        driver.run()
    assert [driver.sequences[RequestKey(0, generation)].cached_len for generation in (1, 2)] == [32, 0]


def test_namespaces_do_not_share(new_driver):
    driver = new_driver()
    for index, namespace in enumerate(["a", "b", "a"]):
        driver.submit(index, range(64), 1, namespace=namespace)
        driver.run()
    assert [driver.sequences[RequestKey(index, 0)].cached_len for index in range(3)] == [0, 0, 48]


@pytest.mark.parametrize(("limit", "cached"), [(0, 0), (15, 0), (16, 16), (47, 32), (None, 48)])
def test_match_limit_bounds_what_the_cache_may_give(new_driver, limit, cached):
    driver = new_driver()
    driver.submit(0, range(64), 1)
    driver.run()
    key = driver.submit(1, range(64), 1, match_limit=limit)
    driver.run()
    assert driver.sequences[key].cached_len == cached


def test_without_prefix_caching_nothing_is_kept(new_driver):
    driver = new_driver(prefix_caching=False)
    for generation in range(2):
        driver.submit(0, range(64), 1, generation=generation)
        driver.run()
    assert driver.sequences[RequestKey(0, 1)].cached_len == 0
    assert driver.plane.stats().cached_blocks == 0


def test_cached_blocks_go_in_the_order_of_last_use_deeper_first(new_driver):
    driver = new_driver(num_blocks=8, max_model_len=129)
    driver.submit(0, range(64), 1)  # blocks 0..3 of this conversation
    driver.run()
    driver.submit(1, range(500, 548), 1)  # three blocks of another, used later
    driver.run()
    driver.submit(2, range(900, 948), 1)  # takes one free block and evicts the two deepest of the first
    driver.run()
    driver.submit(3, range(500, 549), 1)
    driver.run()
    driver.submit(4, range(65), 1)
    driver.run()
    assert driver.sequences[RequestKey(3, 0)].cached_len == 48
    assert driver.sequences[RequestKey(4, 0)].cached_len in (16, 32)


def test_end_tokens_count_only_after_min_new_tokens(new_driver, depth):
    driver = new_driver(depth)
    early = driver.submit(0, [5, 6], 20, end_token_ids=(END,))
    late = driver.submit(1, [5, 7], 20, end_token_ids=(END,), min_new_tokens=4)
    driver.forced = {early: {2: END}, late: {2: END, 5: END}}
    driver.run()
    assert [len(driver.sequences[key].generated) for key in (early, late)] == [3, 6]
    assert driver.sequences[early].generated[-1] == END
    assert {driver.sequences[key].finish for key in (early, late)} == {FinishCode.STOP}


@pytest.mark.parametrize(("max_new", "max_model_len", "expected"), [(5, 4096, 5), (100, 20, 16), (100, 4096, 61)])
def test_length_ends_at_the_first_of_three_limits(new_driver, depth, max_new, max_model_len, expected):
    driver = new_driver(depth, num_blocks=4, max_model_len=max_model_len)
    key = driver.submit(0, [3, 4, 5, 6], max_new)
    driver.run()
    assert len(driver.sequences[key].generated) == expected
    assert driver.sequences[key].finish is FinishCode.LENGTH
    # Not a token is computed in vain: K/V of all but the last.
    assert driver.sequences[key].computed == 4 + expected - 1


@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 31, 32, 33, 47, 48])
def test_prompts_around_page_boundaries_in_a_pool_that_just_fits(new_driver, depth, after, prompt_len):
    driver = new_driver(depth, num_blocks=3, max_num_batched_tokens=8)
    for generation in range(2):
        key = driver.submit(0, range(20, 20 + prompt_len), 100, generation=generation)
        driver.run()
        count = 3 * 16 + 1 - prompt_len
        assert driver.sequences[key].generated == after(list(range(20, 20 + prompt_len)), count)
    assert driver.plane.stats().used_blocks == 0


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(new_driver):
    driver = new_driver(num_blocks=4, max_model_len=100)
    driver.submit(0, range(65))
    driver.submit(1, range(100))
    driver.submit(2, range(64))
    driver.run()
    assert [(r.key.index, r.needed_tokens, r.capacity_tokens) for r in driver.refusals] == [(0, 65, 64), (1, 101, 100)]
    assert driver.finished == [RequestKey(2, 0)]
    driver.submit(0, range(5), generation=1)
    driver.run()
    assert driver.finished[-1] == RequestKey(0, 1)


def test_sooner_priority_goes_first_and_arrival_order_holds_within(new_driver):
    driver = new_driver(max_num_seqs=1)
    for index, priority in enumerate([0, 5, 0, -5]):
        driver.submit(index, [index + 2] * 3, 3, priority=priority)
    driver.run()
    assert [key.index for key in driver.finished] == [3, 0, 2, 1]


@pytest.mark.parametrize(("ageing_steps", "overtaken"), [(10, 3), (40, 9)])
def test_waiting_lifts_a_request_past_newcomers_of_a_sooner_class(new_driver, ageing_steps, overtaken):
    driver = new_driver(max_num_seqs=1, ageing_steps=ageing_steps)
    driver.submit(0, [3, 3], 5)
    old = driver.submit(1, [4, 4], 5, priority=1)
    for num_finished in range(1, 30):
        driver.submit(1 + num_finished, [5] * 3, 5)
        while len(driver.finished) < num_finished:
            driver.step()
        if old in driver.finished:
            break
    # Each takes five steps; who came less than ageing_steps after the old one goes before it.
    assert driver.finished.index(old) == overtaken


def test_the_same_events_give_the_same_plans(new_driver):
    def record():
        driver = new_driver(1, num_blocks=24, max_num_seqs=5)
        for index in range(12):
            driver.submit(index, range(index, index + 30 + 5 * index), 20, priority=index % 3)
        driver.run()
        return driver.plans

    assert record() == record()


def test_plan_arrays_are_views_of_two_buffers_in_turn(new_driver):
    driver = new_driver()
    driver.submit(0, range(10), 8)
    driver.apply()
    plans = [driver.step() for _ in range(3)]
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in (plans[0].rows, plans[0].token_ids))
    assert plans[0].rows.shape == (1, 5)
    assert plans[0].page_delta.shape[1:] == (4,)
    assert np.shares_memory(plans[0].rows, plans[2].rows)
    assert not np.shares_memory(plans[0].rows, plans[1].rows)


def test_arrays_without_rows_are_the_same_in_all_plans_and_nobody_writes_to_them(new_driver):
    driver = new_driver()
    driver.submit(0, range(10), 8)
    driver.apply()
    plans = [driver.step() for _ in range(3)]
    widths = {"token_ids": (), "seated": (3,), "zero": (2,), "copy": (3,), "load": (4,), "store": (4,)}
    for name, width in widths.items():
        first, second = getattr(plans[1], name), getattr(plans[2], name)
        assert first is second and first.shape == (0, *width) and first.dtype == np.int32
        assert not first.flags.writeable


def test_the_time_may_come_with_the_batch(new_driver):
    driver = new_driver()
    key = driver.submit(0, range(10), 100, deadline_ms=5)
    assert driver.plane.apply(4) == []
    driver.step()
    assert driver.plane.apply(5) == []
    driver.run()
    assert driver.sequences[key].finish is FinishCode.DEADLINE


def test_statistics_add_up(new_driver):
    driver = new_driver()
    for generation in range(2):
        driver.submit(0, range(64), 4, generation=generation)
        driver.run()
    stats = driver.plane.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (128, 8)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (128, 48)
    assert (stats.num_running, stats.num_waiting, stats.num_held, stats.used_blocks) == (0, 0, 0, 0)
    assert stats.total_blocks == 256
    assert stats.num_steps == len(driver.plans)


def test_nothing_to_do_is_no_plan(new_driver):
    driver = new_driver()
    assert driver.plane.next_plan() is None
    assert not driver.plane.has_work()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda plane: plane.cancel(RequestKey(3, 0)),
        lambda plane: plane.finish(RequestKey(0, 0), 1),
        lambda plane: plane.release(RequestKey(0, 7)),
        lambda plane: plane.submit(RequestKey(0, 1), np.array([1], np.int32), max_new_tokens=1),
        lambda plane: plane.submit(RequestKey(1, 0), np.array([], np.int32), max_new_tokens=1),
        lambda plane: plane.submit(RequestKey(1, 0), np.array([1], np.int32), max_new_tokens=0),
        lambda plane: plane.submit(RequestKey(-1, 0), np.array([1], np.int32), max_new_tokens=1),
    ],
)
def test_an_invalid_event_drops_its_whole_batch(new_driver, wrong):
    driver = new_driver()
    key = driver.submit(0, range(10), 8)
    driver.apply()
    driver.plane.tick(5)
    driver.plane.cancel(key)
    wrong(driver.plane)
    with pytest.raises(CheckError, match=r"CHECK\(.*\) failed: "):
        driver.plane.apply()
    driver.plane.tick(1)  # had the first tick been applied, time would go back here
    driver.run()
    assert driver.sequences[key].finish is FinishCode.LENGTH


@pytest.mark.parametrize(
    ("offsets", "token_ids", "faults", "step"),
    [
        ([0, 1], [5], [0], 2),
        ([0, 0], [], [0], 1),
        ([0, 2], [5, 6], [0], 1),
        ([0, 1], [-5], [0], 1),
        ([0, 1], [5, 6], [0], 1),
        ([0], [], [], 1),
        ([0, 1], [5], [0, 0], 1),
    ],
)
def test_a_malformed_result_is_refused_before_anything_changes(new_driver, offsets, token_ids, faults, step):
    driver = new_driver()
    key = driver.submit(0, range(10), 8)
    driver.apply()
    driver.plan()
    arrays = [np.array(values, np.int32) for values in (offsets, token_ids, faults)]
    with pytest.raises(CheckError):
        driver.plane.advance(StepResult(step, *arrays))
    driver.advance()
    driver.run()
    assert driver.sequences[key].finish is FinishCode.LENGTH


def test_a_check_is_an_assertion_and_a_runtime_error():
    assert issubclass(CheckError, AssertionError)
    assert issubclass(CheckError, RuntimeError)


def test_adapters_do_not_share(new_driver):
    driver = new_driver()
    for index, adapter in enumerate(["", "a", "a"]):
        driver.submit(index, range(64), 1, adapter=adapter)
        driver.run()
    assert [driver.sequences[RequestKey(index, 0)].cached_len for index in range(3)] == [0, 0, 48]


def test_placeholders_match_only_with_the_same_contents(new_driver):
    driver = new_driver()
    # An image of 10 placeholder tokens in the second and third block.
    for index, content in enumerate([7, 8, 7]):
        driver.submit(index, range(64), 1, spans=(ContentSpan(25, 10, 1, content),))
        driver.run()
    assert [driver.sequences[RequestKey(index, 0)].cached_len for index in range(3)] == [0, 16, 48]


HYBRID = (
    CacheGroup(GroupKind.FULL, 16, 256),
    CacheGroup(GroupKind.FULL, 32, 128),
    CacheGroup(GroupKind.WINDOW, 16, 128, window=64),
    CacheGroup(GroupKind.RECURRENT, 32, 64),
)


def test_all_groups_resume_at_one_boundary(new_driver, depth, after):
    driver = new_driver(depth, groups=HYBRID)
    prompt = list(range(300))
    for generation in range(3):
        key = driver.submit(0, prompt, 5, generation=generation)
        driver.run()
        assert driver.sequences[key].generated == after(prompt, 5)
        assert driver.sequences[key].cached_len == (288 if generation else 0)
    assert driver.plane.stats().used_blocks == 0


def test_expired_pages_of_a_window_become_holes(new_driver, depth):
    driver = new_driver(depth, groups=(CacheGroup(GroupKind.WINDOW, 16, 64, window=32),), max_num_batched_tokens=32)
    driver.submit(0, range(20), 300)
    table, most = {}, 0
    driver.apply()
    while driver.plane.has_work():
        plan = driver.step()
        for _, group, block, page in plan.page_delta.tolist() if plan else ():
            assert group == 0
            table[block] = page
            most = max(most, sum(page != 0 for page in table.values()))
    assert sum(page == 0 for page in table.values()) >= 16
    assert most <= 8


def host_driver(new_driver, depth=0, **options):
    return new_driver(depth, num_blocks=8, num_host_blocks=64, max_model_len=129, **options)


@pytest.mark.parametrize("host_store", HostStore)
def test_an_evicted_prefix_comes_back_from_the_host(new_driver, depth, host_store, after):
    driver = host_driver(new_driver, depth, host_store=host_store)
    for index in range(4):
        driver.submit(index, range(1000 * index, 1000 * index + 64), 4)
        driver.run()
    assert driver.plane.stats().stored_blocks >= 4
    key = driver.submit(4, [*range(64), 5], 4)
    driver.run()
    assert driver.sequences[key].cached_len == 64
    assert driver.sequences[key].generated == after([*range(64), 5], 4)
    assert driver.plane.stats().loaded_tokens == 64
    assert len(driver.loads) == 4
    assert driver.plane.stats().num_transfers == 0


def test_rows_wait_for_the_load_and_a_failed_one_is_computed_instead(new_driver, after):
    driver = host_driver(new_driver)
    for index in range(4):
        driver.submit(index, range(1000 * index, 1000 * index + 64), 4)
        driver.run()
    driver.acks = False
    key = driver.submit(4, [*range(64), 5], 4)
    driver.apply()
    plan = driver.plan()
    driver.advance()
    assert plan.rows.shape == (0, 5)
    (lease,) = {row[0] for row in driver.loads}
    assert driver.plan() is None
    driver.plane.transfer_done(lease + 1000, True)  # unknown
    driver.apply()
    assert driver.plan() is None
    driver.plane.transfer_done(lease, False)
    driver.plane.transfer_done(lease, True)  # late
    driver.acks = True
    driver.run()
    assert driver.sequences[key].generated == after([*range(64), 5], 4)
    assert driver.plane.stats().loaded_tokens == 0


def replayed(index, events):
    """The index after the events; a removal names what is there, and nothing is stored twice."""
    start = 0
    for kind, tier, group, *words, num_tokens in events.rows.tolist():
        block, parent = (tier, group, *words[:2]), tuple(words[2:])
        token_ids = tuple(events.token_ids[start : start + num_tokens].tolist())
        start += num_tokens
        if kind == KvEventKind.STORED:
            assert block not in index
            index[block] = (parent, token_ids)
        else:
            del index[block]
    assert start == len(events.token_ids)
    return index


def test_kv_events_replay_to_the_index(new_driver, depth):
    driver = host_driver(new_driver, depth, kv_events=True)
    index = {}
    for number in range(6):
        driver.submit(number, range(1000 * number, 1000 * number + 64), 4)
        driver.run()
        replayed(index, driver.plane.take_kv_events())
    stats = driver.plane.stats()
    by_tier = [[block for block in index if block[0] == tier] for tier in KvTier]
    assert [len(blocks) for blocks in by_tier] == [stats.cached_blocks, stats.host_used_blocks]
    # A chain of device blocks spells the prompt.
    ids = {block[2:]: value for block, value in index.items() if block[0] == KvTier.DEVICE}
    last = [token_ids for _, token_ids in ids.values() if token_ids[-1] == 5063]
    assert last == [tuple(range(5048, 5064))]
    assert len(driver.plane.take_kv_events().rows) == 0


def test_without_kv_events_none_are_kept(new_driver):
    driver = new_driver()
    driver.submit(0, range(64), 4)
    driver.run()
    assert driver.plane.take_kv_events().rows.shape == (0, 8)


def test_partitions_have_seats_of_their_own_and_follow_warm_pages(new_driver, after):
    driver = new_driver(num_partitions=2, max_num_seqs=2)
    first = driver.submit(0, range(64), 2, partition_hint=1)
    driver.run()
    assert {row[0] // 2 for rows in driver.plans for row in rows} == {1}
    again = driver.submit(1, range(64), 2)
    driver.run()
    assert driver.sequences[again].cached_len == 48
    assert driver.sequences[first].generated == driver.sequences[again].generated == after(list(range(64)), 2)


def test_drafted_tokens_are_refunded(new_driver):
    driver = new_driver()
    key = driver.submit(0, range(30), 8, draft_width=3)
    driver.run()
    widths = [row[RowField.DRAFT_LEN] for rows in driver.plans for row in rows]
    assert max(widths) == 3
    assert driver.sequences[key].finish is FinishCode.LENGTH
    assert len(driver.sequences[key].generated) == 8
    assert driver.plane.stats().used_blocks == 0
