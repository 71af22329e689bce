# SPDX-License-Identifier: Apache-2.0
"""Plans that move pages, with and without rows: every lease is answered once, whatever becomes of the step."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.core.plan import RowKind
from tokenspeed.execution import ModelRunner

LAST, DECODE = RowKind.PREFILL_LAST, RowKind.DECODE
PROMPT = list(range(20))


@pytest.fixture
def runner(tiny_path: Path, tools: Any) -> Iterator[ModelRunner]:
    made = tools.new_runner(tools.engine_config(tiny_path, host_tokens=80))
    yield made
    made.close()


def prefill(runner: ModelRunner, tools: Any, seat: int, first_page: int) -> int:
    """The token after PROMPT, computed on three pages."""
    pages = [(seat, index, first_page + index) for index in range(3)]
    plan = tools.make_plan(0, [(seat, LAST, 0, 20)], PROMPT, seated=[seat], pages=pages)
    return int(runner.launch(plan, [tools.make_seating(seat, PROMPT)]).wait().result.token_ids[0])


def decode(runner: ModelRunner, tools: Any, seat: int) -> int:
    return int(runner.launch(tools.make_plan(1, [(seat, DECODE, 20, 1)]), []).wait().result.token_ids[0])


def test_stored_pages_come_back_after_their_own_were_overwritten(runner: ModelRunner, tools: Any) -> None:
    prefill(runner, tools, 0, 1)
    expected = decode(runner, tools, 0)
    layers = runner._buffers.kv_layers
    before = [layer.k[[1, 2, 3]].clone() for layer in layers]
    stored = runner.launch(tools.make_plan(2, [], store=[(4, 0, 1, 9), (4, 0, 2, 10), (5, 0, 3, 1)]), []).wait()
    assert stored.transfers == ((4, True), (5, True))
    assert not stored.result.fault
    assert [stored.result.step_id, *stored.result.accepted_offsets, *stored.result.token_ids] == [2, 0]
    assert (stored.logprobs, stored.prompt_logprobs) == ((), ())
    zeroed = runner.launch(tools.make_plan(3, [], zero=[(0, 1), (0, 2), (0, 3)]), []).wait()
    assert zeroed.transfers == ()
    assert not any(layer.k[1:4].any() for layer in layers)
    loaded = runner.launch(tools.make_plan(4, [], load=[(6, 0, 31, 9), (6, 0, 32, 10), (6, 0, 33, 1)]), []).wait()
    assert loaded.transfers == ((6, True),)
    assert all(torch.equal(layer.k[[31, 32, 33]], kept) for layer, kept in zip(layers, before, strict=True))
    # The loaded pages serve in the place of the first: the token at 20 is computed again from them.
    first = prefill(runner, tools, 1, 41)
    pages = [(0, index, 31 + index) for index in range(3)]
    plan = tools.make_plan(5, [(0, LAST, 20, 1)], [first], seated=[0], pages=pages)
    output = runner.launch(plan, [tools.make_seating(0, PROMPT, generated=[first])]).wait()
    assert output.result.token_ids.tolist() == [expected]


def test_moves_travel_beside_rows(runner: ModelRunner, tools: Any) -> None:
    expected = prefill(runner, tools, 0, 1)
    pages = [(1, index, 11 + index) for index in range(3)]
    plan = tools.make_plan(
        1, [(1, LAST, 0, 20)], PROMPT, seated=[1], pages=pages, store=[(3, 0, 1, 1)], load=[(2, 0, 50, 7)]
    )
    output = runner.launch(plan, [tools.make_seating(1, PROMPT)]).wait()
    assert output.result.token_ids.tolist() == [expected]
    assert sorted(output.transfers) == [(2, True), (3, True)]
    assert runner.poll_transfers() == ()


def test_a_failed_move_is_no_fault_and_a_fault_answers_its_moves(
    runner: ModelRunner, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(step: Any) -> torch.Tensor:
        raise RuntimeError("out of luck")

    prefill(runner, tools, 0, 1)
    with caplog.at_level(logging.ERROR):
        output = runner.launch(
            tools.make_plan(1, [(0, DECODE, 20, 1)], store=[(1, 0, 1, 11), (2, 0, 1, 10)]), []
        ).wait()
        assert not output.result.fault
        assert sorted(output.transfers) == [(1, False), (2, True)]
        runner._logits = explode
        output = runner.launch(tools.make_plan(2, [(0, DECODE, 21, 1)], load=[(3, 0, 60, 10)]), []).wait()
        assert output.result.fault
        assert output.transfers == ((3, True),)
    assert "transfer 1 failed" in caplog.text


def test_moves_that_outlast_their_step_are_told_by_a_later_one(
    runner: ModelRunner, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending: list[tuple[int, bool]] = [(1, True)]
    poll: Callable[[], tuple[tuple[int, bool], ...]] = lambda: ()  # noqa: E731
    monkeypatch.setattr(runner._mover, "poll", lambda: poll())
    assert runner.launch(tools.make_plan(1, [], store=[(1, 0, 1, 1)]), []).wait().transfers == ()
    poll = lambda: tuple(pending)  # noqa: E731
    assert runner.poll_transfers() == ((1, True),)
    assert runner.launch(tools.make_plan(2, []), []).wait().transfers == ((1, True),)


def test_a_scripted_model_answers_at_once(tmp_path: Path, tools: Any) -> None:
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "script.json").write_text(json.dumps({"vocab_size": 300, "context_length": 256, "replies": []}))
    made = tools.new_runner(tools.engine_config(folder, load_format="scripted", kv_tokens=400, host_tokens=80))
    output = made.launch(tools.make_plan(0, [], store=[(1, 0, 5, 3)], load=[(2, 0, 6, 3)]), []).wait()
    assert sorted(output.transfers) == [(1, True), (2, True)]
    (group,) = made.info.groups
    assert (group.num_blocks, group.num_host_blocks) == (50, 10)
    made.close()
