# SPDX-License-Identifier: Apache-2.0
"""Numbers at the ends of their range, and arrays of a wrong type: refused with what was wrong, or clamped, never taken
for something else. After each refusal the plane goes on."""

from __future__ import annotations

import numpy as np
import pytest

from tokenspeed.control import CheckError, ControlPlane
from tokenspeed.core.plan import CacheGroup, FinishCode, GroupKind, RequestKey, StepResult
from tokenspeed.core.request import ContentSpan, Retention

LAST = 2**63 - 1
FULL = CacheGroup(GroupKind.FULL, 16, 64)
WINDOW = CacheGroup(GroupKind.WINDOW, 16, 64, window=32)
STATE = CacheGroup(GroupKind.RECURRENT, 16, 64)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def goes_on(driver):
    """A request that has nothing to do with what was refused."""
    key = driver.submit(7, range(5000, 5020), 3)
    driver.run()
    assert driver.sequences[key].finish is FinishCode.LENGTH
    assert driver.plane.stats().used_blocks == 0


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (STATE,), (FULL, WINDOW, STATE)], ids=len)
@pytest.mark.parametrize("max_new", [LAST, LAST - 2, LAST - 4, 2**62, 2**31, 57])
def test_a_limit_beyond_the_context_window_is_the_window(new_driver, depth, groups, max_new):
    driver = new_driver(depth, groups=groups, max_model_len=60)
    key = driver.submit(0, range(4), max_new)
    beside = driver.submit(1, range(100, 105), 3)
    driver.run()
    assert not driver.refusals
    assert len(driver.sequences[key].generated) == 56
    assert driver.sequences[beside].finish is driver.sequences[key].finish is FinishCode.LENGTH
    goes_on(driver)


@pytest.mark.parametrize(
    "groups", [(CacheGroup(GroupKind.WINDOW, 16, 3, window=32),), (CacheGroup(GroupKind.FULL, 16, 3),)]
)
def test_a_huge_limit_does_not_hide_that_a_prompt_never_fits(new_driver, groups):
    driver = new_driver(groups=groups, max_model_len=200)
    driver.submit(0, range(100), LAST)
    driver.apply()
    assert [(refusal.needed_tokens, refusal.capacity_tokens) for refusal in driver.refusals] == [(100, 48)]
    goes_on(driver)


@pytest.mark.parametrize("option", [{"min_new_tokens": LAST}, {"match_limit": LAST}, {"deadline_ms": LAST}])
def test_an_option_that_never_applies_changes_nothing(new_driver, option):
    driver = new_driver()
    key = driver.submit(0, range(40), 5, end_token_ids=(1,), **option)
    driver.run()
    assert len(driver.sequences[key].generated) == 5
    goes_on(driver)


CONFIGURATIONS = {
    "groups": {"groups": ()},
    "kind of group 3": {"groups": (CacheGroup(3, 16, 64),)},
    "kind of group -1": {"groups": (CacheGroup(-1, 16, 64),)},
    "num_blocks 0": {"groups": (CacheGroup(GroupKind.FULL, 16, 0),)},
    "num_blocks 9": {"groups": (CacheGroup(GroupKind.FULL, 16, LAST),)},
    "num_host_blocks -1": {"groups": (CacheGroup(GroupKind.FULL, 16, 64, -1),)},
    "num_host_blocks 9": {"groups": (CacheGroup(GroupKind.FULL, 16, 64, LAST),)},
    "block_size 0": {"groups": (CacheGroup(GroupKind.FULL, 0, 64),)},
    "block_size 9": {"groups": (CacheGroup(GroupKind.FULL, LAST, 64),)},
    "window 0": {"groups": (CacheGroup(GroupKind.WINDOW, 16, 64),)},
    "window 1": {"groups": (CacheGroup(GroupKind.WINDOW, 16, 64, window=1),)},
    "window 9": {"groups": (CacheGroup(GroupKind.WINDOW, 16, 64, window=LAST),)},
    "window -5": {"groups": (CacheGroup(GroupKind.FULL, 16, 64, window=-5),)},
    "least common multiple": {
        "groups": tuple(CacheGroup(GroupKind.FULL, size, 64) for size in (536870909, 536870879, 536870869))
    },
    "num_partitions 0": {"num_partitions": 0},
    "num_partitions -1": {"num_partitions": -1},
    "num_partitions 2": {"num_partitions": 2**31 - 1},
    "max_num_seqs 0": {"max_num_seqs": 0},
    "max_num_seqs 2": {"max_num_seqs": 2**31 - 1, "max_num_batched_tokens": 2**31},
    "max_num_batched_tokens 7": {"max_num_batched_tokens": 7},
    "max_num_batched_tokens 46": {"max_num_batched_tokens": 2**62, "num_partitions": 4},
    "max_num_batched_tokens 92": {"max_num_batched_tokens": LAST},
    "max_num_mixed_prefill_tokens 0": {"max_num_mixed_prefill_tokens": 0},
    "max_num_mixed_prefill_tokens -1": {"max_num_mixed_prefill_tokens": -1},
    "max_num_mixed_prefill_tokens 92": {"max_num_mixed_prefill_tokens": LAST},
    "mixed_step_unit 0": {"mixed_step_unit": 0},
    "mixed_step_unit 92": {"mixed_step_unit": LAST},
    "max_model_len 1": {"max_model_len": 1},
    "max_model_len 9": {"max_model_len": LAST},
    "ageing_steps 0": {"ageing_steps": 0},
    "ageing_steps 4": {"ageing_steps": 2**62},
    "host_store 2": {"host_store": 2},
    "host_store -1": {"host_store": -1},
}


@pytest.mark.parametrize("named", CONFIGURATIONS)
def test_a_configuration_out_of_range_is_refused_by_its_name(named):
    sound = {"groups": (FULL,), "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096}
    ControlPlane(**sound)
    with pytest.raises(CheckError, match=named):
        ControlPlane(**(sound | CONFIGURATIONS[named]))


def test_a_number_that_its_place_cannot_hold_is_a_type_error(new_driver):
    driver = new_driver()
    for call in [
        lambda plane: plane.submit(RequestKey(2**31, 0), ids(1), max_new_tokens=1),
        lambda plane: plane.submit(RequestKey(0, 0), ids(1), max_new_tokens=2**63),
        lambda plane: plane.tick(2**63),
        lambda plane: plane.cancel(RequestKey(0, 2**31)),
        lambda plane: plane.submit(RequestKey(0, 0), ids(1), max_new_tokens=1, retain=Retention("s", 1e30)),
    ]:
        with pytest.raises(TypeError):
            call(driver.plane)
    goes_on(driver)


WRONG_ARRAYS = {
    "int64": np.array([1, 2**32 + 5, 3]),
    "float": np.array([1.7, 2.9, 3.0]),
    "nan": np.array([np.nan, 1, 2], np.float32),
    "uint32": np.array([2**32 - 1, 2, 3], np.uint32),
    "bool": np.array([True, False, True]),
    "other byte order": np.array([1, 2, 3], ">i4"),
    "two dimensions": np.ones((2, 2), np.int32),
    "list": [1, 2, 3],
    "strided": np.arange(6, dtype=np.int32)[::2],
    "None": None,
}


@pytest.mark.parametrize("kind", WRONG_ARRAYS)
def test_a_prompt_that_is_no_int32_array_is_a_type_error(new_driver, kind):
    driver = new_driver()
    with pytest.raises(TypeError):
        driver.plane.submit(RequestKey(0, 0), WRONG_ARRAYS[kind], max_new_tokens=5)
    goes_on(driver)


@pytest.mark.parametrize("place", ["accepted_offsets", "token_ids", "row_faults"])
@pytest.mark.parametrize("kind", ["int64", "float", "bool", "uint32", ">i4", "matrix", "None"])
def test_a_result_that_is_no_int32_array_is_a_type_error(new_driver, place, kind):
    driver = new_driver()
    key = driver.submit(0, range(10), 3)
    driver.apply()
    plan = driver.plan()
    arrays = {"accepted_offsets": ids(0, 1), "token_ids": ids(5), "row_faults": ids(0)}
    match kind:
        case "None":
            arrays[place] = None
        case "matrix":
            arrays[place] = arrays[place].reshape(1, -1)
        case _:
            arrays[place] = arrays[place].astype(np.dtype(kind))
    with pytest.raises(TypeError, match=place):
        driver.plane.advance(StepResult(plan.step_id, **arrays))
    driver.advance()
    driver.run()
    assert driver.sequences[key].finish is FinishCode.LENGTH


def test_a_prompt_that_is_read_only_is_taken(new_driver):
    driver = new_driver()
    prompt = ids(*range(20))
    prompt.flags.writeable = False
    driver.plane.submit(RequestKey(0, 0), prompt, max_new_tokens=1)
    assert driver.plane.apply() == []
    assert driver.plane.next_plan().token_ids.tolist() == list(range(20))


@pytest.mark.parametrize("prompt", [(-1,), (1, 2, -3), (-(2**31), 5)])
def test_a_negative_token_is_refused(new_driver, prompt):
    driver = new_driver()
    driver.plane.submit(RequestKey(0, 0), ids(*prompt), max_new_tokens=5)
    with pytest.raises(CheckError, match=f"is {min(prompt)}"):
        driver.plane.apply()
    goes_on(driver)


@pytest.mark.parametrize(
    "spans",
    [
        [(5, LAST)],
        [(5, LAST), (0, 3)],
        [(LAST, 1)],
        [(LAST, LAST)],
        [(15, 6)],
        [(20, 1)],
        [(-1, 6)],
        [(5, 0)],
        [(5, -1)],
        [(5, 5), (9, 2)],
    ],
    ids=str,
)
def test_a_span_beyond_the_prompt_or_another_is_refused(new_driver, spans):
    driver = new_driver()
    driver.plane.submit(
        RequestKey(0, 0), ids(*range(20)), max_new_tokens=5, spans=tuple(ContentSpan(*span, 1, 2) for span in spans)
    )
    with pytest.raises(CheckError, match="span"):
        driver.plane.apply()
    goes_on(driver)


def test_a_span_up_to_the_end_of_the_prompt_is_taken(new_driver):
    driver = new_driver()
    key = driver.submit(0, range(20), 5, spans=(ContentSpan(0, 5, 1, 2), ContentSpan(5, 15, 1, 2)))
    driver.run()
    assert driver.sequences[key].finish is FinishCode.LENGTH


def test_the_length_of_a_span_is_part_of_what_it_is(new_driver):
    driver = new_driver()
    # The last of the placeholders is content in one and an ordinary token in the other.
    for index, length in enumerate([20, 19, 20]):
        driver.submit(index, range(64), 1, spans=(ContentSpan(16, length, 9, 9),))
        driver.run()
    assert [driver.sequences[RequestKey(index, 0)].cached_len for index in range(3)] == [0, 16, 48]


@pytest.mark.parametrize("ttl_s", [LAST // 1000, 9.2e15, 1e12])
@pytest.mark.parametrize("now_ms", [0, 5_000, 10**17])
def test_a_long_hold_outlives_the_next_tick(new_driver, ttl_s, now_ms):
    driver = new_driver()
    driver.plane.tick(now_ms)
    driver.submit(0, range(40), 2, retain=Retention("s", ttl_s))
    driver.run()
    driver.plane.tick(now_ms + 1)
    driver.apply()
    assert driver.plane.stats().num_held == 1
    driver.plane.tick(LAST)
    driver.apply()
    assert driver.plane.stats().num_held == 0
    assert driver.plane.stats().used_blocks == 0


@pytest.mark.parametrize("ageing_steps", [1, 2**29 - 1])
def test_the_sooner_class_goes_first_however_slow_ageing_is(new_driver, ageing_steps):
    driver = new_driver(ageing_steps=ageing_steps, max_num_seqs=1)
    late = driver.submit(0, range(10), 2, priority=1 << 20)
    soon = driver.submit(1, range(50, 60), 2, priority=-(1 << 20))
    driver.run()
    assert driver.finished == [soon, late]


@pytest.mark.parametrize("keep", [0, 3, 5, LAST])
@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_a_finish_that_comes_after_the_end_costs_nobody_anything(new_driver, end, keep):
    driver = new_driver(1)
    key = driver.submit(0, range(20), 30)
    for _ in range(8):
        driver.step()
    if end == "finish":
        driver.plane.finish(key, 3)
    else:
        driver.plane.cancel(key)
    driver.apply()
    beside = driver.submit(1, range(100, 120), 3)
    driver.plane.finish(key, keep)
    driver.run()
    assert driver.sequences[beside].finish is FinishCode.LENGTH
    assert driver.sequences[key].finish is (FinishCode.STOP if end == "finish" else FinishCode.CANCELLED)
    goes_on(driver)
