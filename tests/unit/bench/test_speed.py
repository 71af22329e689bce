# SPDX-License-Identifier: Apache-2.0
"""The phases on an engine in its own process, and what of them is refused before an engine starts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import engine_info
from tokenspeed import cli
from tokenspeed.bench import speed
from tokenspeed.bench.floor import Ceilings
from tokenspeed.bench.phases import Prompts, Shapes, medians
from tokenspeed.bench.speed import Machine, Wanted
from tokenspeed.bench.streams import Arrival, Timing
from tokenspeed.core.errors import CapacityError, ConfigError

MACHINE = Machine(False, Ceilings("a machine", read_bytes_s=1e12, flop_s=1e13, cache_bytes=1 << 20))
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that holds a configuration and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "machine_of", lambda config: MACHINE)


@pytest.mark.usefixtures("known_machine")
def test_all_phases_of_a_folder_without_tokenizer_or_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "result.json"
    command = ["bench", "latency", str(folder), "--load-format", "dummy", "--device", "cpu", "--threads", "1"]
    command += ["--phases", "abcd", "--shrink", "256", "--reps", "2", "--kv-tokens", "16384", "--json", str(out)]
    assert cli.main(command) == 0
    shown, _ = capsys.readouterr()
    result: dict[str, Any] = json.loads(out.read_text())
    assert list(result["figures"]) == ["A", "B", "C16", "C64", "D"]
    assert all(len(repetitions) == 2 for repetitions in result["figures"].values())
    for name, repetitions in result["figures"].items():
        assert all(value > 0 or figure == "num_cached" for each in repetitions for figure, value in each.items()), name
        assert f"\n{name} " in shown
    cold, warm = result["figures"]["C16"]
    assert "prefill_tokens_s" in cold
    assert "prefill_tokens_s" not in warm
    assert cold["num_cached"] == 0
    assert warm["num_cached"] > 0
    assert result["figures"]["D"][0]["num_cached_later"] > 0
    assert result["engine"]["model_type"] == "qwen3"
    weights = result["engine"]["num_parameters"] - 300 * 32
    assert result["floors"]["A"]["token_s"] == pytest.approx(4 * weights / 1e12, rel=0.2)
    assert result["ceilings"]["read_bytes_s"] == 1e12


def test_packed_weights_are_read_in_their_own_size_and_only_what_is_read_counts() -> None:
    """What the machine computes was measured on numbers: it would be no floor of products of bytes."""
    source, figures = SimpleNamespace(config=CONFIG), {name: [] for name in ("A", "B", "C16", "C64", "D")}
    num_parameters, num_kv_bytes = 100_000, 64 * 32 * 16
    facts = {"num_parameters": num_parameters, "kv_bytes": num_kv_bytes, "weight_bytes": 4 * num_parameters}
    ceilings = Ceilings("a machine", read_bytes_s=1e12, flop_s=1e3, cache_bytes=1)

    def floors(ceilings: Ceilings, **changes: int) -> dict[str, dict[str, float]]:
        info = engine_info(**{**facts, **changes})
        return speed._floors(source, info, ceilings, Shapes().shrunk(256), figures)  # type: ignore[arg-type]

    packed = floors(ceilings, weight_bytes=num_parameters // 2, packed_bytes=num_parameters // 4)
    assert {name: set(each) for name, each in packed.items()} == {
        "A": {"token_s"}, "B": {"token_s"}, "C16": {"itl_s"}, "C64": {"itl_s"}, "D": {"user_token_s"}
    }  # fmt: skip
    assert floors(ceilings)["A"]["token_s"] > 1.0, "numbers are multiplied at that rate"
    reads_only = dataclasses.replace(ceilings, flop_s=1e30)
    kv_s = floors(reads_only, weight_bytes=1, packed_bytes=1)["A"]["token_s"]
    assert packed["A"]["token_s"] - kv_s == pytest.approx((floors(reads_only)["A"]["token_s"] - kv_s) / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--phases", "AX"], "--phases AX: use letters of ABCD"),
        (["--phases", ""], "use letters of ABCD"),
        (["--reps", "0"], "--reps 0: use 1 to 100"),
        (["--shrink", "0"], "--shrink 0: use 1 to 1024"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--block-size", "3"], "--block-size 3"),
    ],
)
@pytest.mark.usefixtures("known_machine")
def test_what_cannot_be_measured_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    command = ["bench", "latency", str(folder), "--load-format", "dummy", "--device", "cpu", "--threads", "1"]
    assert cli.main([*command, *arguments]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: ")
    assert text in told


@pytest.mark.parametrize(
    ("phases", "changes", "text"),
    [
        ("ABC", {"num_kv_blocks": 100}, "phase B needs 32897 tokens of KV at once and the pool has 1600"),
        ("C", {"num_kv_blocks": 34000}, "phase C needs 544768 tokens of KV at once"),
        ("D", {"max_model_len": 11863}, "phase D has sequences of 11864 tokens and the engine takes 11863"),
    ],
)
def test_an_engine_too_small_for_a_phase_is_refused(phases: str, changes: dict[str, int], text: str) -> None:
    info = engine_info(**{"max_model_len": 40000, "num_kv_blocks": 34048, **changes})
    with pytest.raises(CapacityError, match=text):
        speed._require_room(info, Wanted(phases), Shapes())
    speed._require_room(engine_info(max_model_len=40000, num_kv_blocks=34048), Wanted("ABCD"), Shapes())


def test_a_timing_counts_from_the_first_arrival() -> None:
    timing = Timing(10.0, (Arrival(10.5, 1), Arrival(11.0, 2), Arrival(12.5, 1)), (1, 2, 3, 4), 0)
    assert timing.ttft_s == 0.5
    assert timing.end_s == 12.5
    assert timing.decode_tokens_s == 3 / 2.0


def test_prompts_are_new_each_time_and_within_the_vocabulary() -> None:
    prompts = Prompts(151_936, 0)
    first, second = prompts.take(500), prompts.take(500)
    assert first != second
    assert min(first + second) >= 1000
    assert max(first + second) < 100_000
    assert max(Prompts(8, 0).take(500)) == 7


def test_shapes_shrink_together() -> None:
    shapes = Shapes().shrunk(64)
    assert (shapes.short_len, shapes.long_len, shapes.batch_len, shapes.turn_len) == (16, 512, 128, 16)
    assert shapes.batches == Shapes().batches
    assert Shapes().longest("B") == 32897
    assert Shapes().longest("D") == 8192 + 4 * 150 + 3 * 1024
    assert Shapes().kv_tokens("C") == 64 * 8512


def test_medians_are_over_the_repetitions_that_have_a_figure() -> None:
    assert medians([{"a": 1.0, "b": 5.0}, {"a": 9.0}, {"a": 2.0}]) == {"a": 2.0, "b": 5.0}


def test_wanted_refuses_what_is_out_of_range() -> None:
    with pytest.raises(ConfigError):
        Wanted("A", reps=101).check("A")
    assert Wanted("A", shrink=1024).check("A").shapes.long_len == 32
