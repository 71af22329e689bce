# SPDX-License-Identifier: Apache-2.0
"""What the worker tells the control plane of its configuration, seen in the plans that come of it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tokenspeed.core.config import DeviceConfig, EngineConfig, SchedulerConfig
from tokenspeed.core.plan import CacheGroup, GroupKind, RequestKey, RowField, RowKind, StepResult
from tokenspeed.engine import worker
from tokenspeed.execution.outputs import RunnerInfo

INFO = RunnerInfo(
    model_type="none",
    num_parameters=1,
    device="cpu",
    dtype="float32",
    num_threads=1,
    block_size=16,
    num_kv_blocks=64,
    kv_bytes=1,
    max_model_len=512,
    max_num_batched_tokens=100,
    vocab_size=1000,
    load_s=0.0,
    groups=(CacheGroup(GroupKind.FULL, 16, 64),),
)


@pytest.mark.parametrize(("given", "beside_a_decode"), [(None, 99), (7, 7), (4096, 99)])
def test_prompts_beside_a_decode_get_what_the_configuration_says(given: int | None, beside_a_decode: int) -> None:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_mixed_prefill_tokens=given)
    config = EngineConfig(scheduler=scheduler, device=DeviceConfig(device="cpu"))
    control = worker._build_control(config, INFO)
    assert worker._describe(config, INFO, 0.0).max_num_mixed_prefill_tokens == (given if given == 7 else 100)
    control.submit(RequestKey(0, 0), np.arange(5, dtype=np.int32), max_new_tokens=9)
    control.apply()
    plan = control.next_plan()
    assert plan is not None
    one, fault = np.array([0, 1], np.int32), np.zeros(1, np.int32)
    control.advance(StepResult(plan.step_id, one, np.array([7], np.int32), fault))
    control.submit(RequestKey(1, 0), np.arange(100, 300, dtype=np.int32), max_new_tokens=9)
    control.apply()
    plan = control.next_plan()
    assert plan is not None
    assert plan.rows[:, RowField.KIND].tolist() == [RowKind.DECODE, RowKind.PREFILL]
    assert plan.rows[:, RowField.QUERY_LEN].tolist() == [1, beside_a_decode]


@pytest.mark.parametrize("was_there", [False, True], ids=["folder-gone", "nobody-listens"])
def test_a_parent_that_has_gone_already_is_no_fault_of_ours(tmp_path: Path, was_there: bool) -> None:
    path = tmp_path / "engine.sock"
    if was_there:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
    ended = subprocess.run(
        [sys.executable, "-m", "tokenspeed.engine.worker", "--socket", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
